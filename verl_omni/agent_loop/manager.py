"""The driver's side of the agent loops."""

import itertools
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any

import numpy as np
import ray
from omegaconf import DictConfig
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.agent_loop.outputs import join
from verl_omni.agent_loop.rewriting import agent_loop_worker
from verl_omni.utils.arrays import object_array

# Trajectories, and what waits for their scores.
Drawn = tuple[DataProto, Callable[[], DataProto]]


class DiffusionAgentLoopManager:
    """Spreads a batch over engines and agent-loop workers, always in the same way."""

    def __init__(
        self,
        config: DictConfig,
        server_handles: list[ray.actor.ActorHandle],
        reward_loop_worker_handles: list[ray.actor.ActorHandle] | None = None,
        workers: list[ray.actor.ActorHandle] | None = None,
    ):
        """`workers` are agent-loop workers that run already; without them, processes of their own are started."""
        self.num_servers, self.num_reward_workers = len(server_handles), len(reward_loop_worker_handles or [None])
        rollout = config.actor_rollout_ref.rollout
        self.max_num_seqs = rollout.max_num_seqs
        # An embedded engine's samples stay with the rank that draws them.
        self.any_server = not config.actor_rollout_ref.hybrid_engine
        self.workers = workers
        if workers is None:
            worker = ray.remote(num_cpus=0)(agent_loop_worker(config))
            self.workers = [
                worker.options(name=f"diffusion_agent_loop_{i}_{uuid.uuid4().hex[:6]}").remote(
                    config, server_handles, reward_loop_worker_handles
                )
                for i in range(rollout.agent.num_workers)
            ]
        self._turns = itertools.cycle(self.workers)

    def start_images(self, batch: DataProto, images_to: dict[int, str] | None = None) -> Callable[[], Drawn]:
        """Ask for every image at once; what comes back waits for them: (trajectories, what waits for their scores).

        The caller can go on while images are drawn, and again while rewards are computed. With
        `meta_info["scores_only"]` there are pixels only where the scores are still to come. `images_to` says which
        rows' images the workers write to disk.
        """
        name = uuid.uuid4().hex
        batch.meta_info["any_server"] = self.any_server
        assign(batch, self.num_servers, self.num_reward_workers, self.max_num_seqs, name)
        chunks = chunked(batch, len(self.workers), whole_forwards=self.any_server)
        workers = self.workers[: len(chunks)]
        drawing = [w.generate_images.remote(batch[c], name) for w, c in zip(workers, chunks, strict=True)]
        scores_only = batch.meta_info.get("scores_only", False)
        files = [own_rows(images_to, chunk) for chunk in chunks]

        def wait() -> Drawn:
            images = ray.get(drawing)
            scores = [w.collect_scores.remote(name, scores_only, f) for w, f in zip(workers, files, strict=True)]
            return join(images), lambda: join(ray.get(scores))

        return wait

    def generate_images(self, batch: DataProto, images_to: dict[int, str] | None = None) -> Drawn:
        """(trajectories, what waits for pixels and scores)."""
        return self.start_images(batch, images_to)()

    def start_groups(self, batch: DataProto, size: int) -> list[tuple[DataProto, Awaitable]]:
        """Of a batch that is drawn at once, each group of `size` rows by itself, for an event loop: (rows, drawing).

        Awaiting `drawing` gives (trajectories, what waits for their scores). No group waits for another's scores.
        """
        name = uuid.uuid4().hex
        assign(batch, self.num_servers, self.num_reward_workers, self.max_num_seqs, name)
        groups = [batch[list(range(start, start + size))] for start in range(0, len(batch), size)]
        return [(rows, self._group(rows, f"{name}/{i}", next(self._turns))) for i, rows in enumerate(groups)]

    async def _group(self, rows: DataProto, name: str, worker: ray.actor.ActorHandle) -> tuple[DataProto, Awaitable]:
        images = await worker.generate_images.remote(rows, name)
        return images, worker.collect_scores.remote(name, rows.meta_info.get("scores_only", False))

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


def chunked(batch: DataProto, workers: int, whole_forwards: bool) -> list[list[int]]:
    """Rows for each worker, about as many each; the forwards of rollout servers as a whole, if there are enough."""
    bursts = list(batch.non_tensor_batch["burst"])
    units = [[row for row, _ in rows] for _, rows in itertools.groupby(enumerate(bursts), key=lambda pair: pair[1])]
    if not whole_forwards or len(units) < workers:
        units = [[row] for row in range(len(batch))]
    parts = np.array_split(np.arange(len(units)), workers)
    return [[row for unit in part for row in units[unit]] for part in parts if len(part)]


def own_rows(by_row: dict[int, Any] | None, chunk: list[int]) -> dict[int, Any] | None:
    """What concerns the rows of a chunk, by their place in it."""
    return None if by_row is None else {i: by_row[row] for i, row in enumerate(chunk) if row in by_row}


def assign(batch: DataProto, num_servers: int, num_reward_workers: int, max_num_seqs: int, name: str = "") -> None:
    """Give every row its engine, where it has none yet, its reward worker, and its places in their bursts.

    Batches are blocks of a burst, whatever the order of arrival: a run then repeats bit for bit. `position` is the
    place among its engine's requests of this batch, a burst that `name` and the engine tell from others. Images that
    one forward of the engine makes are a burst of rewards (`reward_place`): none waits for images of a later forward.
    """
    rows, size = batch.non_tensor_batch, len(batch)
    if "server" not in rows:
        rows["server"] = object_array([i * num_servers // size for i in range(size)])
    positions = places(rows["server"])
    forwards = [index // max_num_seqs for index, _ in positions]
    workers = [i % num_reward_workers for i in range(size)]
    if batch.meta_info.get("compares"):  # the images of a group meet in one process
        rows["compared"] = object_array(places(rows["uid"]))
        groups = {uid: number for number, uid in enumerate(dict.fromkeys(rows["uid"]))}
        workers = [groups[uid] % num_reward_workers for uid in rows["uid"]]
    bursts = [(name, server, forward) for server, forward in zip(rows["server"], forwards, strict=True)]
    rows["position"] = object_array(
        [(*position, (name, server)) for position, server in zip(positions, rows["server"], strict=True)]
    )
    rows["burst"] = object_array(bursts)
    rows["reward_worker"] = object_array(workers)
    rows["reward_place"] = object_array(places(zip(rows["data_source"], bursts, workers, strict=True)))


def places(keys: Iterable[Hashable]) -> list[tuple[int, int]]:
    """(how many of the same key came before, how many there are) for each."""
    keys = list(keys)
    totals, seen = Counter(keys), Counter()
    found = []
    for key in keys:
        found.append((seen[key], totals[key]))
        seen[key] += 1
    return found
