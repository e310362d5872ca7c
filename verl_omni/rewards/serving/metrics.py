"""What a reward server tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest


class Metrics:
    """Counted from the start of one server, in a registry of its own."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "verl_omni_reward_requests", "requests for scores, by HTTP status", ["scorer", "status"], registry=registry
        )
        self.waiting = Gauge(
            "verl_omni_reward_waiting", "samples that wait or are being scored", ["scorer"], registry=registry
        )
        self.batch_size = Histogram(
            "verl_omni_reward_batch_size",
            "samples of a call of the scorer",
            ["scorer"],
            registry=registry,
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
        )
        self.batch_seconds = Histogram(
            "verl_omni_reward_batch_seconds",
            "how long a call of the scorer took",
            ["scorer"],
            registry=registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100),
        )

    def text(self) -> bytes:
        return generate_latest(self._registry)
