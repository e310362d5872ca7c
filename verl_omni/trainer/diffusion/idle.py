"""Where training and rollout overlap: how much of a step each of them waits for the other."""

from time import perf_counter

THIRD = 1 / 3
STEPS = 10  # over which the shares are averaged before anything is said


def shares(timing: dict[str, float]) -> dict[str, float]:
    """`idle/training` and `idle/rollout`, of the step: training waits for samples, servers for the next weights."""
    step = timing["step"]
    drawing = min(timing["gen_images"], step)
    return {"idle/training": (timing["gen"] + timing.get("reward", 0.0)) / step, "idle/rollout": 1 - drawing / step}


class BusyTime:
    """Seconds in which servers draw, added up over all of them."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._seconds = 0.0

    def begin(self, server: int) -> None:
        self._since[server] = perf_counter()

    def end(self, server: int) -> None:
        self._seconds += perf_counter() - self._since.pop(server)

    def take(self) -> float:
        """Of the time since this was last asked. What goes on is counted up to now."""
        for server in list(self._since):
            self.end(server)
            self.begin(server)
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Balance:
    """Says once that one side waits for more than a third of the time, and what would balance them."""

    def __init__(self, training: int, rollout: int):
        self.devices = {"training": training, "rollout": rollout}
        self.seen: list[dict[str, float]] = []
        self.said = False

    def see(self, timing: dict[str, float]) -> str | None:
        """The line, if it is time for it."""
        waiting = timing["gen"] + timing.get("reward", 0.0)
        work = {"learning": timing["step"] - waiting, "drawing": timing["gen_images"]}
        self.seen.append(shares(timing) | work)
        if self.said or len(self.seen) <= STEPS:  # the first step is not like the others
            return None
        recent = self.seen[-STEPS:]
        mean = {name: sum(row[name] for row in recent) / STEPS for name in recent[0]}
        for side, other in (("training", "rollout"), ("rollout", "training")):
            if mean[f"idle/{side}"] > THIRD:
                self.said = True
                # Work is seconds times devices; both sides take equally long where devices are as work is.
                wanted = mean["drawing"] * self.devices["rollout"] / (mean["learning"] * self.devices["training"])
                now = self.devices["rollout"] / self.devices["training"]
                return (
                    f"{side} waits for {other} {mean[f'idle/{side}']:.0%} of the time: with {wanted:.2g} rollout "
                    f"devices for each that trains (now {now:.2g}) neither would"
                )
        return None
