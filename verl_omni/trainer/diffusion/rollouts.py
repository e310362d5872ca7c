"""Where samples are drawn: in the training workers, or by servers of their own. The trainer asks both in one way."""

import asyncio
import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future
from time import perf_counter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import ray
from omegaconf import DictConfig
from ray.exceptions import ActorUnavailableError

from verl_omni.report.timeline import Timeline
from verl_omni.trainer.failures import innermost, one_line
from verl_omni.trainer.resources import busy_at_once, worker_environment
from verl_omni.utils.actors import asked_until_back, watch
from verl_omni.utils.background import start, wait_for
from verl_omni.workers.layout import Layout
from verl_omni.workers.rollout import server_class


class EmbeddedRollouts:
    """The engine of each training worker, on the weights that are trained.

    A sample whose rank is known beforehand is drawn by the rank that will train on it, and its trajectory stays there,
    unless others train on it as well: then any rank draws it, so that all have something to do. With `share_samples`
    one of each group does, and the others compute with it.
    """

    def __init__(self, actor_wg: Any, layout: Layout, share_samples: bool = False):
        self.actor_wg, self.layout = actor_wg, layout
        drawing = layout.speakers if share_samples else range(len(actor_wg.workers))
        self.servers = [actor_wg.workers[rank] for rank in drawing]

    def begin(self, policy: str, version: int, precision: str | None = None) -> None:
        self.actor_wg.start_rollout(policy, version, precision)

    def end(self) -> None:
        self.actor_wg.stop_rollout()

    def places(self, ranks: list[int] | None, samples: int) -> tuple[list[int], bool]:
        """(the server of each sample, whether trajectories have to travel); `ranks` are those that will train."""
        if ranks is not None and self.layout.sequence == 1:
            return ranks, False
        return in_turn(samples, len(self.servers)), self.layout.world > 1

    def loading(self) -> list[Any]:
        """They load with their workers."""
        return []

    def compiling_seconds(self) -> float:
        """That drawing has waited for a compiler until now; of several processes the longest."""
        return max(ray.get([server.compiling_seconds.remote() for server in self.servers]))

    def metrics(self) -> dict[str, float]:
        return {}

    def shutdown(self) -> None:
        """They end with their workers."""


class Weights(NamedTuple):
    """The trained weights of a policy as they were after `version` training steps, where any process can fetch them."""

    policy: str
    version: int
    stored: Any

    @property
    def name(self) -> tuple[str, int]:
        return self.policy, self.version


class ServerRollouts:
    """Servers with copies of the model; weights that they do not have yet are pushed to them before they draw.

    A server that dies is started again by Ray. It gets the weights that it had, and whoever waits for its samples asks
    again: they are drawn anew, from the same seeds.
    """

    def __init__(
        self, servers: list[Any], actor_wg: Any, timeline: Timeline, send: Callable[[str, int], Any] | None = None
    ):
        """`send` brings weights to the servers in another way than through Ray's object store."""
        self.servers, self.actor_wg, self.timeline = servers, actor_wg, timeline
        self._send = send or (lambda policy, version: actor_wg.publish_weights(policy, version)[0])
        self.restarts = 0
        self._loading = dict(enumerate(server.start.remote() for server in servers))
        self._held: dict[int, Weights] = {}
        self._pushing = [asyncio.Lock() for _ in servers]
        self._watches: list[Future] = []
        self._addresses: dict[int, str] = {}

    def loading(self) -> list[Any]:
        """For each server that has not drawn yet, what is there when it has loaded."""
        return list(self._loading.values())

    def compiling_seconds(self) -> float:
        """That drawing has waited for a compiler until now; of several processes the longest."""

        async def asked() -> list[float]:
            ask = (asked_until_back(server.compiling_seconds.remote) for server in self.servers)
            return await asyncio.gather(*ask)

        return max(wait_for(asked()))

    def listen(self, port: int) -> None:
        """Server i answers people over HTTP on port + i (0: on a free one), from now on and when it was started again.
        A line says where."""

        async def listening() -> list[str]:
            return await asyncio.gather(
                *(self._listen(server, port and port + server) for server in range(len(self.servers)))
            )

        self._addresses = dict(enumerate(wait_for(listening())))
        print(f"Look at the policy while it trains: {', '.join(self._addresses.values())}", flush=True)

    async def _listen(self, server: int, port: int) -> str:
        return await asked_until_back(lambda: self.servers[server].listen.remote(port))

    def watch(self) -> None:
        """From now on, look after servers that die."""
        self._watches = [
            start(watch(f"rollout server {i}", server, functools.partial(self._came_back, i)))
            for i, server in enumerate(self.servers)
        ]

    async def _came_back(self, server: int) -> None:
        self.restarts += 1
        await asked_until_back(lambda: self.servers[server].start.remote())
        async with self._pushing[server]:
            if server in self._held:
                await self._push(server)
        if server in self._addresses:
            await self._listen_again(server)

    async def _listen_again(self, server: int) -> None:
        """At the same address. Training goes on without it, should somebody have taken the port or the token."""
        try:
            await self._listen(server, urlsplit(self._addresses[server]).port)
        except ValueError as error:
            print(f"rollout server {server} no longer answers over HTTP: {one_line(innermost(error))}", flush=True)

    def begin(self, policy: str, version: int, precision: str | None = None) -> None:
        """All servers at once: none of them draws now. They go by the precision that each request names."""
        held = self._held.get(0)
        known = held is not None and held.name == (policy, version)
        weights = held if known else self.publish(policy, version)

        async def ready() -> None:
            await asyncio.gather(*(self.ready(server, lambda: weights) for server in range(len(self.servers))))

        wait_for(ready())

    def publish(self, policy: str, version: int) -> Weights:
        """What the training workers hold now. In Ray's object store it lies as long as somebody keeps the answer."""
        return Weights(policy, version, self._send(policy, version))

    async def ready(self, server: int, newest: Callable[[], Weights]) -> Weights:
        """One server that draws nothing now is to draw with the weights that are the newest when it has loaded."""
        async with self._pushing[server]:
            if server in self._loading:
                with contextlib.suppress(ActorUnavailableError):  # it died, and loads again
                    await self._loading.pop(server)
            await asked_until_back(lambda: self.servers[server].begin.remote())
            weights, held = newest(), self._held.get(server)
            if held is None or held.name != weights.name:
                begun = perf_counter()
                self._held[server] = weights
                await self._push(server)
                self.timeline.add(f"rollout {server}", "weights", begun, perf_counter())
            return weights

    async def _push(self, server: int) -> None:
        weights = self._held[server]
        await asked_until_back(lambda: self.servers[server].update_weights.remote(weights.stored, weights.version))

    def metrics(self) -> dict[str, float]:
        return {"rollout/server_restarts": float(self.restarts)}

    def end(self) -> None:
        """A server may go on with what others ask of it."""

    def places(self, ranks: list[int] | None, samples: int) -> tuple[list[int], bool]:
        return in_turn(samples, len(self.servers)), True

    def shutdown(self) -> None:
        for watching in self._watches:
            watching.cancel()
        for server in self.servers:
            ray.kill(server)


def start_servers(config: DictConfig, device: str, places: list[dict[str, Any]]) -> list[Any]:
    """A rollout server in each of these places."""
    rollout = config.actor_rollout_ref.rollout
    server = ray.remote(server_class(rollout.name))
    busy = busy_at_once(config, rollout.n_gpus_per_node or 1)
    others = {
        # With a checkpoint engine, nobody keeps the weights that a server would need which has been started again.
        "max_restarts": 0 if rollout.checkpoint_engine.backend else rollout.server_restarts,
        "runtime_env": {"env_vars": worker_environment(device, busy, config.ray.address)},
    }
    return [server.options(**place, **others).remote(config) for place in places]


def by_checkpoint_engine(config: DictConfig, workers: list[Any], servers: list[Any]) -> Callable[[str, int], Any]:
    """Weights go from the training ranks to the servers with one of verl's checkpoint engines, to all at once."""
    from verl_omni.workers.transfer.channel import backend, turns

    engine = backend(config.actor_rollout_ref.rollout.checkpoint_engine)

    def everybody(method: str, train: list[dict], draw: list[dict]) -> list[Any]:
        calls = zip([*workers, *servers], [*train, *draw], strict=True)
        return ray.get([one.execute_checkpoint_engine.remote(method, **arguments) for one, arguments in calls])

    def send(policy: str, version: int) -> Any:
        nothing = [{}] * len(workers), [{}] * len(servers)
        topology = engine.build_topology(len(workers), len(servers), everybody("prepare", *nothing))
        everybody("init_process_group", *map(turns, topology))
        receiving = [server.receive_weights.remote((policy, version)) for server in servers]
        sent, *_ = ray.get([worker.send_weights.remote((policy, version)) for worker in workers] + receiving)
        everybody("finalize", *nothing)
        return sent

    return send


def in_turn(samples: int, servers: int) -> list[int]:
    """Equal blocks of consecutive samples: those of one prompt meet in one server."""
    return [i * servers // samples for i in range(samples)]
