"""From prompts to scored trajectories: one task a sample, its reward asked for as soon as its image exists."""

import asyncio
import itertools
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.config import DiffusionModelConfig
from verl_omni.data.open_images import open_images
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.rewards.choice import OWN, read_choices, rewards_of
from verl_omni.rewards.reward_function import RewardError
from verl_omni.utils.actors import asked_until_back
from verl_omni.utils.arrays import object_array
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.padding import pad_and_cat
from verl_omni.utils.pictures import write_image
from verl_omni.utils.registry import Registry
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import COLUMN, TrajectoryRef

AGENT_LOOPS: Registry[type["DiffusionAgentLoopBase"]] = Registry("agent loop")


# Trajectories, and what waits for their scores.
Drawn = tuple[DataProto, Callable[[], DataProto]]


def register(name: str):
    """Class decorator: rows with this `agent_name` run that agent loop."""

    def wrap(cls: type) -> type:
        AGENT_LOOPS.add(name, cls)
        return cls

    return wrap


@dataclass
class DiffusionAgentLoopOutput:
    """One sample: its image (or text), what training needs, and (once scored) its reward."""

    response: torch.Tensor | str
    prompt_ids: list[int]
    fields: dict[str, torch.Tensor]
    reference: Any = None  # to what training needs, where it is not in `fields`
    version: int = 0  # of the weights that made it
    reward_score: float | None = None
    reward_extra_info: dict[str, Any] = field(default_factory=dict)
    reward_failure: str | None = None  # why it has no score: that is NaN then
    image_time: float = 0.0
    score_time: float = 0.0


class DiffusionAgentLoopBase(ABC):
    def __init__(self, model_config: DiffusionModelConfig, server: Any):
        self.model_config, self.server = model_config, server
        self.adapter = DiffusionModelBase.get_class(model_config)

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs) -> DiffusionAgentLoopOutput: ...


@register("diffusion_single_turn_agent")
class DiffusionSingleTurnAgentLoop(DiffusionAgentLoopBase):
    """One prompt, one image."""

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> DiffusionAgentLoopOutput:
        images, tokenizers = open_images(kwargs.get("images")), kwargs["tokenizers"]
        limit = sampling_params["max_sequence_length"]
        ids = self.adapter.tokenize(tokenizers, kwargs["prompt"], limit, images)
        negative = kwargs.get("negative_prompt") or sampling_params["negative_prompt"]
        output: RolloutOutput = await self.server.generate.remote(
            prompt_ids=ids,
            sampling_params=sampling_params,
            request_id=uuid.uuid4().hex,
            image_data=images,
            negative_prompt_ids=self.adapter.tokenize(tokenizers, negative, limit, images),
        )
        return DiffusionAgentLoopOutput(output.image, ids, {**output.trajectory, **output.conditions})


class SampleEngine:
    """The engine as one sample sees it, whatever its agent loop hands on.

    A sample's place in the burst belongs to its first request. Later turns, of which some samples have more than
    others, are batched as they come; a sample that never asks gives its place back. Each request's trajectory is left
    under a name of its own: the one that is trained on is that of the response which the loop returns.
    """

    def __init__(self, server: Any, row: dict[str, Any]):
        self.server, self.position, self.place = server, row.get("position"), row.get("place")
        self.generate = SimpleNamespace(remote=self._generate)
        self.answers: list[RolloutOutput] = []
        self._requests = 0

    async def _generate(self, *, sampling_params: dict[str, Any], **request: Any) -> RolloutOutput:
        number, self._requests = self._requests, self._requests + 1
        params = {k: v for k, v in sampling_params.items() if k not in ("position", "place")}
        if number == 0 and self.position is not None:
            params["position"] = self.position
        if self.place is not None:
            params["place"] = self.place | {"key": f"{self.place['key']}.{number}" if number else self.place["key"]}

        def ask() -> Awaitable[RolloutOutput]:
            asked = self._ask(sampling_params=dict(params), **request)
            params.pop("position", None)  # a server that is asked again may have answered a part of the burst before
            return asked

        answer = await asked_until_back(ask)
        self.answers.append(answer)
        return answer

    async def _ask(self, *, sampling_params: dict[str, Any], **request: Any) -> RolloutOutput:
        place = sampling_params.get("place")
        if place is None or not place["ship"]:
            return await self.server.generate.remote(sampling_params=sampling_params, **request)
        answer, stored = self.server.generate_to_ship.remote(sampling_params=sampling_params, **request)
        return replace(await answer, reference=TrajectoryRef(place["key"], stored))

    async def leave(self) -> None:
        if not self._requests and self.position is not None:
            await asked_until_back(lambda: self.server.withdraw.remote(self.position))

    def answer_of(self, response: Any) -> RolloutOutput:
        """The request that made what the loop returned."""
        own = [answer for answer in self.answers if answer.response is response]
        if not own and len(self.answers) > 1:
            raise ValueError(
                f"an agent loop asked for {len(self.answers)} images and returned none of them: which one is to be "
                "trained on? Return the response of one request as it came"
            )
        return (own or self.answers or [RolloutOutput(response)])[0]


class DiffusionAgentLoopWorker:
    """Runs the agent loops of a batch. The engine behind `server_handles` may be embedded or a server."""

    def __init__(
        self,
        config: DictConfig,
        server_handles: list[ray.actor.ActorHandle],
        reward_loop_worker_handles: list[ray.actor.ActorHandle] | None = None,
    ):
        self.config = config
        import_external_lib(config.actor_rollout_ref.model.external_lib)
        self.servers, self.reward_workers = server_handles, reward_loop_worker_handles
        self.model_config: DiffusionModelConfig = OmegaConf.to_object(config.actor_rollout_ref.model)
        self.tokenizers = DiffusionModelBase.get_class(self.model_config).load_tokenizers(self.model_config)
        self.default_agent = config.actor_rollout_ref.rollout.agent.default_agent_loop
        scorers = config.reward.scorers
        self.choices = read_choices(OmegaConf.to_container(scorers, resolve=True) if scorers else None)
        self._batches: dict[str, ScoredBatch] = {}

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Images (`responses`, uint8), trajectories, text features and (with reward workers) `rm_scores` of a batch.

        Each row of `batch` has a prompt and a seed; `meta_info["sampling_params"]` holds what all rows share.
        """
        name = uuid.uuid4().hex
        return side_by_side(await self.generate_images(batch, name), await self.collect_scores(name))

    async def generate_images(self, batch: DataProto, name: str) -> DataProto:
        """The trajectories, once the last image exists. Pixels and scores of these rows are for `collect_scores`.

        `name` tells this batch from others that are under way.
        """
        rows = [self._row(batch, i) for i in range(len(batch))]
        shared = batch.meta_info["sampling_params"]
        start = time.perf_counter()
        loops = [self._run_agent_loop(dict(shared), row) for row in rows]
        self._batches[name] = ScoredBatch(loops, rows, self._score)
        outputs = await self._batches[name].images()
        timing = {"images": max(o.image_time for o in outputs) - start}
        return DataProto.from_dict(fields(outputs), references(outputs), meta_info={"timing": timing})

    async def collect_scores(
        self, name: str, scores_only: bool = False, images_to: dict[int, str] | None = None
    ) -> DataProto:
        """The images of a `generate_images` with their scores, once all of them are there.

        With `scores_only` images whose scores are known do not travel. `images_to` are files (without their ending) to
        write images to, by row.
        """
        scored = self._batches.pop(name)
        outputs = await scored.scores()
        result = collate(outputs, scores_only)
        whole = self.config.actor_rollout_ref.rollout.n
        files = best_and_worst(outputs, scored.rows, whole) | (images_to or {})
        names = {row: write_image(outputs[row].response, Path(file)) for row, file in files.items()}
        result.non_tensor_batch["image_file"] = object_array([names.get(row) for row in range(len(outputs))])
        waited = max(o.score_time for o in outputs) - max(o.image_time for o in outputs)
        result.meta_info["timing"] = {"rewards": max(0.0, waited)}
        return result

    def _row(self, batch: DataProto, i: int) -> dict[str, Any]:
        return {key: values[i] for key, values in batch.non_tensor_batch.items()}

    async def _run_agent_loop(self, sampling_params: dict[str, Any], row: dict[str, Any]) -> DiffusionAgentLoopOutput:
        name = row.get("agent_name") or self.default_agent
        for key in ("seed", "init_seed", "sde_window", "position", "place"):
            if row.get(key) is not None:
                sampling_params[key] = row[key]
        engine = SampleEngine(self.servers[row["server"]], row)
        loop = AGENT_LOOPS.get(name)(self.model_config, engine)
        output = await loop.run(sampling_params, tokenizers=self.tokenizers, **row)
        await engine.leave()
        answer = engine.answer_of(output.response)
        output.reference, output.version = answer.reference, answer.version
        output.image_time = time.perf_counter()
        return output

    async def _score(self, output: DiffusionAgentLoopOutput, row: dict[str, Any]) -> None:
        ids = torch.tensor([output.prompt_ids], dtype=torch.long)
        await self._compute_score(output, ids, output.response[None], torch.ones_like(ids), ids, row)

    async def _compute_score(
        self,
        output: DiffusionAgentLoopOutput,
        prompts: torch.Tensor,
        responses: torch.Tensor,
        attention_mask: torch.Tensor,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        """Ask a reward worker, if there are any, for the score of one finished image, and put it into `output`.

        For a subclass to override: tokens of the prompt (1, L), the image (1, C, H, W), and the row of the batch.
        """
        if not self.reward_workers:
            return
        keys = ("data_source", "reward_model", "extra_info", "prompt")
        one = DataProto.from_dict(
            tensors={"responses": responses},
            non_tensors={k: np.array([kwargs[k]], dtype=object) for k in keys if k in kwargs},
        )
        one.meta_info |= {"burst": kwargs["burst"], "position": kwargs["reward_place"]}
        result = await self._answer(self.reward_workers[kwargs["reward_worker"]], one, kwargs.get("prompt", ""))
        output.reward_score = result["reward_score"]
        output.reward_extra_info = result.get("reward_extra_info", {})
        output.reward_failure = result.get("reward_failure")
        output.score_time = time.perf_counter()

    async def _answer(self, worker: ray.actor.ActorHandle, one: DataProto, prompt: str) -> dict[str, Any]:
        """The worker watches its function's time; a function that stops the whole worker is noticed from here."""
        limit = self.config.reward.timeout
        answer = asyncio.ensure_future(wrap(worker.compute_score.remote(one)))
        while not (await asyncio.wait([answer], timeout=limit))[0]:
            try:
                await asyncio.wait_for(wrap(worker.is_awake.remote()), limit)
            except asyncio.TimeoutError as error:
                own = self.config.reward.custom_reward_function
                chosen = rewards_of(one.non_tensor_batch["data_source"][0], self.choices, own.path is not None)
                names = {OWN: f"{own.name} ({Path(own.path or '').name})"}
                named = " or ".join(names.get(choice.name, choice.label) for choice in chosen)
                raise RewardError(
                    f'reward function {named} blocks its whole process for more than {limit:g} s (prompt: "{prompt}"): '
                    "mend it, or raise reward.timeout"
                ) from error
        return answer.result()


async def wrap(reference: ray.ObjectRef) -> Any:
    return await reference


class ScoredBatch:
    """Images that are being made and scored, each scored as soon as it exists. The first failure ends all of it."""

    def __init__(
        self,
        loops: list[Coroutine[Any, Any, DiffusionAgentLoopOutput]],
        rows: list[dict[str, Any]],
        score: Callable[[DiffusionAgentLoopOutput, dict[str, Any]], Awaitable[None]],
    ):
        async def scored(image: asyncio.Task, row: dict[str, Any]) -> DiffusionAgentLoopOutput:
            output = await image
            await score(output, row)
            return output

        self.rows = rows
        self._images = [asyncio.create_task(loop) for loop in loops]
        self._scores = [asyncio.create_task(scored(*pair)) for pair in zip(self._images, rows, strict=True)]
        self._failure = asyncio.get_running_loop().create_future()
        for task in self._images + self._scores:
            task.add_done_callback(self._note_failure)

    def _note_failure(self, task: asyncio.Task) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_result(error)  # the first one is told

    async def images(self) -> list[DiffusionAgentLoopOutput]:
        """All images; their scores may still be missing."""
        return await self._results(self._images)

    async def scores(self) -> list[DiffusionAgentLoopOutput]:
        return await self._results(self._scores)

    async def _results(self, wanted: list[asyncio.Task]) -> list[DiffusionAgentLoopOutput]:
        results = asyncio.gather(*wanted, return_exceptions=True)
        try:
            await asyncio.wait([results, self._failure], return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                raise self._failure.result()
            return [task.result() for task in wanted]
        except BaseException:
            for task in self._images + self._scores:
                task.cancel()
            raise


def best_and_worst(outputs: list[DiffusionAgentLoopOutput], rows: list[dict[str, Any]], whole: int) -> dict[int, str]:
    """Files for the image of each group that the reward likes best, and least, where a row says where (`keep_to`).

    Of a group of which others have a part, so that fewer than `whole` samples are here, nobody knows them.
    """
    groups: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        if row.get("keep_to") is not None and outputs[i].reward_score is not None:
            groups.setdefault(row["keep_to"], []).append(i)
    files = {}
    for place, group in groups.items():
        members = [i for i in group if not np.isnan(outputs[i].reward_score)] if len(group) == whole else []
        if not members:
            continue
        files[max(members, key=lambda i: outputs[i].reward_score)] = f"{place}_best"
        files.setdefault(min(members, key=lambda i: outputs[i].reward_score), f"{place}_worst")
    return files


def fields(outputs: list[DiffusionAgentLoopOutput]) -> dict[str, torch.Tensor]:
    """What training needs of each sample; `sample` alone (its place) where nothing was kept."""
    named = {name: pad_and_cat([o.fields[name][None] for o in outputs]) for name in outputs[0].fields}
    return named or {"sample": torch.arange(len(outputs))}


def references(outputs: list[DiffusionAgentLoopOutput]) -> dict[str, np.ndarray]:
    """Which weights made each sample, and where its trajectory lies."""
    columns = {"version": object_array([o.version for o in outputs])}
    if outputs[0].reference is not None:
        columns[COLUMN] = object_array([o.reference for o in outputs])
    return columns


def collate(outputs: list[DiffusionAgentLoopOutput], scores_only: bool = False) -> DataProto:
    scored = outputs[0].reward_score is not None
    tensors, non_tensors = {}, {}
    if not (scored and scores_only):
        responses = [o.response for o in outputs]
        if all(isinstance(r, torch.Tensor) and r.shape == responses[0].shape for r in responses):
            tensors["responses"] = torch.stack(responses)
        else:  # texts, or images of different sizes
            non_tensors["responses"] = object_array(responses)
            tensors["sample"] = torch.arange(len(outputs))
    if scored:
        tensors["rm_scores"] = torch.tensor([[o.reward_score] for o in outputs], dtype=torch.float32)
        # In one column of their own: a reward may give its numbers any name, `seed` and `uid` too.
        non_tensors["reward_extra_info"] = object_array([o.reward_extra_info for o in outputs])
        non_tensors["reward_failure"] = object_array([o.reward_failure for o in outputs])
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


class DiffusionAgentLoopManager:
    """The driver's side: spreads a batch over engines and agent-loop workers, always in the same way."""

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
        self.workers = workers
        if workers is None:
            worker = ray.remote(DiffusionAgentLoopWorker)
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
        assign(batch, self.num_servers, self.num_reward_workers, self.max_num_seqs, name)
        chunks = [c.tolist() for c in np.array_split(np.arange(len(batch)), len(self.workers)) if len(c)]
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


def own_rows(by_row: dict[int, Any] | None, chunk: list[int]) -> dict[int, Any] | None:
    """What concerns the rows of a chunk, by their place in it."""
    return None if by_row is None else {i: by_row[row] for i, row in enumerate(chunk) if row in by_row}


def assign(batch: DataProto, num_servers: int, num_reward_workers: int, max_num_seqs: int, name: str = "") -> None:
    """Give every row its engine, where it has none yet, its reward worker, and its places in their bursts.

    Batches are blocks of a burst, whatever the order of arrival: a run then repeats bit for bit. `position` is the
    place among its engine's requests of this batch, which `name` tells from others. Images that one forward of the
    engine makes are a burst of rewards (`reward_place`): none waits for images of a later forward.
    """
    rows, size = batch.non_tensor_batch, len(batch)
    if "server" not in rows:
        rows["server"] = object_array([i * num_servers // size for i in range(size)])
    positions = places(rows["server"])
    forwards = [index // max_num_seqs for index, _ in positions]
    workers = [i % num_reward_workers for i in range(size)]
    bursts = [(name, server, forward) for server, forward in zip(rows["server"], forwards, strict=True)]
    rows["position"] = object_array([(*position, name) for position in positions])
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


def side_by_side(images: DataProto, scores: DataProto) -> DataProto:
    """Both halves of the same rows as one batch."""
    timing = images.meta_info["timing"] | scores.meta_info["timing"]
    tensors = {k: half.batch[k] for half in (images, scores) for k in half.batch.keys()}
    non_tensors = images.non_tensor_batch | scores.non_tensor_batch
    return DataProto.from_dict(tensors, non_tensors, meta_info=scores.meta_info | {"timing": timing})


def join(outputs: list[DataProto]) -> DataProto:
    """Concatenate; text features of different length are padded to the longest."""
    if len(outputs) == 1:
        return outputs[0]
    tensors = {k: pad_and_cat([o.batch[k] for o in outputs]) for k in outputs[0].batch.keys()}
    non_tensors = {k: np.concatenate([o.non_tensor_batch[k] for o in outputs]) for k in outputs[0].non_tensor_batch}
    timing = {k: max(o.meta_info["timing"][k] for o in outputs) for k in outputs[0].meta_info["timing"]}
    return DataProto.from_dict(
        tensors=tensors, non_tensors=non_tensors, meta_info=outputs[0].meta_info | {"timing": timing}
    )
