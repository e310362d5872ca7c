"""From prompts to scored trajectories: one task a sample, its reward asked for as soon as its image exists."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig, OmegaConf
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.utils.arrays import object_array
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.open_images import open_images
from verl_omni.utils.suggest import unknown
from verl_omni.workers.config import DiffusionModelConfig
from verl_omni.workers.rollout.base import ImageOutput, pad_and_cat

AGENT_LOOPS: dict[str, type["DiffusionAgentLoopBase"]] = {}


def register(name: str):
    """Class decorator: rows with this `agent_name` run that agent loop."""

    def wrap(cls: type) -> type:
        AGENT_LOOPS[name] = cls
        return cls

    return wrap


@dataclass
class DiffusionAgentLoopOutput:
    """One sample: its image, what training needs, and (once scored) its reward."""

    response: torch.Tensor
    prompt_ids: list[int]
    fields: dict[str, torch.Tensor]
    reward_score: float | None = None
    reward_extra_info: dict[str, Any] = field(default_factory=dict)
    image_time: float = 0.0


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
        output: ImageOutput = await self.server.generate.remote(
            prompt_ids=ids,
            sampling_params=sampling_params,
            request_id=uuid.uuid4().hex,
            image_data=images,
            negative_prompt_ids=self.adapter.tokenize(tokenizers, negative, limit, images),
        )
        return DiffusionAgentLoopOutput(output.image, ids, {**output.trajectory, **output.conditions})


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

    async def generate_sequences(self, batch: DataProto) -> DataProto:
        """Images (`responses`, uint8), trajectories, text features and (with reward workers) `rm_scores` of a batch.

        Each row of `batch` has a prompt and a seed; `meta_info["sampling_params"]` holds what all rows share.
        """
        tasks = [
            asyncio.create_task(self._run_agent_loop(dict(batch.meta_info["sampling_params"]), self._row(batch, i)))
            for i in range(len(batch))
        ]
        start = time.perf_counter()
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        result = collate(outputs)
        images_done = max(o.image_time for o in outputs)
        result.meta_info["timing"] = {"images": images_done - start, "rewards": time.perf_counter() - images_done}
        return result

    def _row(self, batch: DataProto, i: int) -> dict[str, Any]:
        return {key: values[i] for key, values in batch.non_tensor_batch.items()}

    async def _run_agent_loop(self, sampling_params: dict[str, Any], row: dict[str, Any]) -> DiffusionAgentLoopOutput:
        name = row.get("agent_name") or self.default_agent
        if name not in AGENT_LOOPS:
            raise ValueError(unknown("agent loop", name, AGENT_LOOPS))
        for key in ("seed", "init_seed", "sde_window", "position", "sample_id"):
            if row.get(key) is not None:
                sampling_params[key] = row[key]
        loop = AGENT_LOOPS[name](self.model_config, self.servers[row["server"]])
        output = await loop.run(sampling_params, tokenizers=self.tokenizers, **row)
        output.image_time = time.perf_counter()
        if self.reward_workers:
            await self._compute_score(output, row)
        return output

    async def _compute_score(self, output: DiffusionAgentLoopOutput, row: dict[str, Any]) -> None:
        """Ask a reward worker for the score of one finished image."""
        keys = ("data_source", "reward_model", "extra_info", "prompt")
        one = DataProto.from_dict(
            tensors={"responses": output.response[None]},
            non_tensors={k: np.array([row[k]], dtype=object) for k in keys if k in row},
        )
        count = len(self.reward_workers)
        index, total = row["sample"]
        mine = (total - index % count + count - 1) // count
        one.meta_info["position"] = (index // count, mine)
        worker = self.reward_workers[index % count]
        result = await worker.compute_score.remote(one)
        output.reward_score = result["reward_score"]
        output.reward_extra_info = result.get("reward_extra_info", {})


def collate(outputs: list[DiffusionAgentLoopOutput]) -> DataProto:
    tensors = {"responses": torch.stack([o.response for o in outputs])}
    for name in outputs[0].fields:
        tensors[name] = pad_and_cat([o.fields[name][None] for o in outputs])
    non_tensors, meta = {}, {}
    if outputs[0].reward_score is not None:
        tensors["rm_scores"] = torch.tensor([[o.reward_score] for o in outputs], dtype=torch.float32)
        keys = sorted({k for o in outputs for k in o.reward_extra_info})
        non_tensors = {k: np.array([o.reward_extra_info.get(k) for o in outputs], dtype=object) for k in keys}
        meta["reward_extra_keys"] = keys
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info=meta)


class DiffusionAgentLoopManager:
    """The driver's side: spreads a batch over engines and agent-loop workers, always in the same way."""

    def __init__(
        self,
        config: DictConfig,
        server_handles: list[ray.actor.ActorHandle],
        reward_loop_worker_handles: list[ray.actor.ActorHandle] | None = None,
    ):
        self.num_servers = len(server_handles)
        worker = ray.remote(DiffusionAgentLoopWorker)
        self.workers = [
            worker.options(name=f"diffusion_agent_loop_{i}_{uuid.uuid4().hex[:6]}").remote(
                config, server_handles, reward_loop_worker_handles
            )
            for i in range(config.actor_rollout_ref.rollout.agent.num_workers)
        ]

    def generate_sequences(self, batch: DataProto) -> DataProto:
        assign(batch, self.num_servers)
        chunks = [batch[list(c)] for c in np.array_split(np.arange(len(batch)), len(self.workers)) if len(c)]
        outputs = ray.get([w.generate_sequences.remote(c) for w, c in zip(self.workers, chunks, strict=False)])
        return join(outputs)

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker)


def assign(batch: DataProto, num_servers: int) -> None:
    """Give every row its engine, where it has none yet, and its places in two bursts: a run then repeats bit for bit.

    `position` is the place among its engine's requests, `sample` that among the rewards of its data_source: those that
    are batched together have to count together, or they wait for rows that never come.
    """
    rows, size = batch.non_tensor_batch, len(batch)
    if "server" not in rows:
        rows["server"] = object_array([i * num_servers // size for i in range(size)])
    rows["position"] = object_array(places(rows["server"]))
    rows["sample"] = object_array(places(rows["data_source"]))


def places(keys: Iterable[Hashable]) -> list[tuple[int, int]]:
    """(how many of the same key came before, how many there are) for each."""
    keys = list(keys)
    totals, seen = Counter(keys), Counter()
    found = []
    for key in keys:
        found.append((seen[key], totals[key]))
        seen[key] += 1
    return found


def join(outputs: list[DataProto]) -> DataProto:
    """Concatenate; text features of different length are padded to the longest."""
    if len(outputs) == 1:
        return outputs[0]
    tensors = {k: pad_and_cat([o.batch[k] for o in outputs]) for k in outputs[0].batch.keys()}
    keys = sorted({k for o in outputs for k in o.non_tensor_batch})
    non_tensors = {
        k: np.concatenate([o.non_tensor_batch.get(k, np.full(len(o), None, dtype=object)) for o in outputs])
        for k in keys
    }
    meta = outputs[0].meta_info | ({"reward_extra_keys": keys} if "reward_extra_keys" in outputs[0].meta_info else {})
    meta["timing"] = {k: max(o.meta_info["timing"][k] for o in outputs) for k in meta["timing"]}
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info=meta)
