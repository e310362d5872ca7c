"""From prompts to scored trajectories: one task a sample, its reward asked for as soon as its image exists."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.agent_loop.outputs import (
    DiffusionAgentLoopOutput,
    best_and_worst,
    collate,
    fields,
    references,
    side_by_side,
    steps_of,
    written,
)
from verl_omni.agent_loop.routing import Block, blocks_of
from verl_omni.agent_loop.sample_engine import SampleEngine
from verl_omni.agent_loop.scored_batch import ScoredBatch
from verl_omni.config import DiffusionModelConfig
from verl_omni.data.open_images import open_images
from verl_omni.data.prompt_rows import SIZES
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.rewards.choice import OWN, read_choices, rewards_of
from verl_omni.rewards.reward_function import RewardError
from verl_omni.rewards.validation import COLUMN as VALIDATES
from verl_omni.rewards.validation import for_validation
from verl_omni.utils.arrays import object_array
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.registry import Registry
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import Several

AGENT_LOOPS: Registry[type["DiffusionAgentLoopBase"]] = Registry("agent loop")


def register(name: str):
    """Class decorator: rows with this `agent_name` run that agent loop."""

    def wrap(cls: type) -> type:
        AGENT_LOOPS.add(name, cls)
        return cls

    return wrap


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
            negative_prompt_ids=self.adapter.tokenize_negative(tokenizers, negative, limit, images),
        )
        return DiffusionAgentLoopOutput(output.response, ids, {**output.trajectory, **output.conditions})


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
        self._batches: dict[str, ScoredBatch] = {}

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """What was made (`responses`; images are uint8), trajectories, text features and (with reward workers)
        `rm_scores` of a batch.

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
        blocks = blocks_of(
            rows,
            len(self.servers),
            self.config.actor_rollout_ref.rollout.max_num_seqs,
            free=batch.meta_info.get("any_server", False),
        )
        loops = [self._run_agent_loop(dict(shared), *pair) for pair in zip(rows, blocks, strict=True)]
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
        names = {row: written(outputs[row].response, Path(file)) | outputs[row].told for row, file in files.items()}
        result.non_tensor_batch["written"] = object_array([names.get(row) for row in range(len(outputs))])
        waited = max(o.score_time for o in outputs) - max(o.image_time for o in outputs)
        result.meta_info["timing"] = {"rewards": max(0.0, waited)}
        return result

    def _row(self, batch: DataProto, i: int) -> dict[str, Any]:
        return {key: values[i] for key, values in batch.non_tensor_batch.items()}

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], row: dict[str, Any], block: Block
    ) -> DiffusionAgentLoopOutput:
        name = row.get("agent_name") or self.default_agent
        for key in (*SIZES, "seed", "init_seed", "branch", "sde_window", "position", "place"):
            if row.get(key) is not None:
                sampling_params[key] = row[key]
        agent_loop = AGENT_LOOPS.get(name)
        if "latents" in sampling_params and agent_loop is not DiffusionSingleTurnAgentLoop:
            sampling_params["latents"] = "too"  # it may look at what it gets, before it asks again
        engine = SampleEngine(self.servers, block, row)
        loop = agent_loop(self.model_config, engine)
        output = await loop.run(sampling_params, tokenizers=self.tokenizers, **row)
        await engine.leave()
        answers = engine.trained(output.response, output.trained)
        output.reference, output.version = answers[0].reference, min(answer.version for answer in answers)
        if len(answers) > 1:
            output.fields, output.reference = steps_of(answers), Several(tuple(one.reference for one in answers))
        elif output.trained:
            output.fields = {**answers[0].trajectory, **answers[0].conditions}
        output.trained = ()
        output.image_time = time.perf_counter()
        return output

    async def _score(self, output: DiffusionAgentLoopOutput, row: dict[str, Any]) -> None:
        ids = torch.tensor([output.prompt_ids], dtype=torch.long)
        one = output.response[None] if isinstance(output.response, torch.Tensor) else object_array([output.response])
        await self._compute_score(output, ids, one, torch.ones_like(ids), ids, row)

    async def _compute_score(
        self,
        output: DiffusionAgentLoopOutput,
        prompts: torch.Tensor,
        responses: torch.Tensor | np.ndarray,
        attention_mask: torch.Tensor,
        input_ids: torch.Tensor,
        kwargs: dict[str, Any],
    ) -> None:
        """Ask a reward worker, if there are any, for the score of one finished sample, and put it into `output`.

        For a subclass to override: tokens of the prompt (1, L), the image (1, C, H, W) or, of what has no pixels, an
        array with it, and the row of the batch.
        """
        if not self.reward_workers:
            return
        keys = ("data_source", "reward_model", "extra_info", "prompt", "uid", "compared", VALIDATES)
        one = DataProto.from_dict(
            tensors={"responses": responses} if isinstance(responses, torch.Tensor) else {"sample": torch.zeros(1)},
            non_tensors={k: np.array([kwargs[k]], dtype=object) for k in keys if k in kwargs},
        )
        if not isinstance(responses, torch.Tensor):
            one.non_tensor_batch["responses"] = responses
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
                named = self._rewards_of(one)
                raise RewardError(
                    f'reward function {named} blocks its whole process for more than {limit:g} s (prompt: "{prompt}"): '
                    "mend it, or raise reward.timeout"
                ) from error
        return answer.result()

    def _rewards_of(self, one: DataProto) -> str:
        """As a user calls those that a sample is given to."""
        config = for_validation(self.config) if VALIDATES in one.non_tensor_batch else self.config
        own, scorers = config.reward.custom_reward_function, config.reward.scorers
        choices = read_choices(OmegaConf.to_container(scorers, resolve=True) if scorers else None)
        chosen = rewards_of(one.non_tensor_batch["data_source"][0], choices, own.path is not None)
        names = {OWN: f"{own.name} ({Path(own.path or '').name})"}
        return " or ".join(names.get(choice.name, choice.label) for choice in chosen)


async def wrap(reference: ray.ObjectRef) -> Any:
    return await reference
