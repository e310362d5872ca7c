"""Rewards for images and videos."""

import asyncio
import inspect
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.rewards.registry import LoadedOnce, get_reward_fn
from verl_omni.rewards.reward_function import RewardFunction
from verl_omni.utils.batcher import Batcher


@register("image")
class ImageRewardManager(RewardManagerBase):
    """Scores single samples, as they finish, with the user's function or the default reward of their data_source.

    A function for many images (parameter `images`) is given up to `reward.batch_size` of one data_source at a time.
    """

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ):
        super().__init__(config, tokenizer, compute_score)
        self.services = {}
        if reward_router_address is not None:
            self.services = {
                "reward_router_address": reward_router_address,
                "reward_model_tokenizer": reward_model_tokenizer,
            }
        self.batch_size = int(config.reward.get("batch_size", 8))
        scorers = config.reward.get("scorers")
        self.scorers = OmegaConf.to_container(scorers) if scorers else {}
        self._functions: dict[str, tuple[RewardFunction, Batcher]] = {}

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """`{"reward_score": float, "reward_extra_info": {...}}` of the last sample in `data`."""
        item = data[-1]
        image = item.batch["responses"]
        fields = item.non_tensor_batch
        sample = {
            "data_source": fields["data_source"],
            "solution_image": image.float() / 255 if image.dtype == torch.uint8 else image.float(),
            "prompt": fields.get("prompt", ""),
            "ground_truth": (fields.get("reward_model") or {}).get("ground_truth"),
            "extra_info": dict(fields.get("extra_info") or {}) | {"prompt": fields.get("prompt", "")},
        }
        function, batcher = self._function(sample["data_source"])
        if function.batched:
            kind = (sample["data_source"], data.meta_info.get("burst"))
            answer = await batcher.submit(sample, kind, data.meta_info.get("position"))
        else:
            (answer,) = await function.score([sample], self.services)
        extra = {k: v for k, v in answer.items() if k != "score"}
        return {"reward_score": answer["score"], "reward_extra_info": extra}

    def _function(self, data_source: str) -> tuple[RewardFunction, Batcher]:
        name = "own" if self.compute_score is not None else data_source
        if name not in self._functions:
            function = as_reward_function(self.compute_score, data_source, self.scorers.get(data_source))
            function.timeout = float(self.config.reward.get("timeout", function.timeout))
            loop = asyncio.get_running_loop()

            def work(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
                return asyncio.run_coroutine_threadsafe(function.score(samples, self.services), loop).result()

            batcher = Batcher(work, self.batch_size, 0.01)
            self._functions[name] = (function, batcher)
        return self._functions[name]

    @classmethod
    def assemble_rm_scores(cls, data: DataProto, scores: list[float]) -> torch.Tensor:
        return torch.tensor(scores, dtype=torch.float32).unsqueeze(-1)


def as_reward_function(compute_score: Any, data_source: str, settings: dict | None = None) -> RewardFunction:
    """The user's function, or the reward of `data_source` with its settings."""
    if isinstance(compute_score, RewardFunction):
        return compute_score
    if compute_score is not None:
        return RewardFunction(compute_score, getattr(compute_score, "__name__", "compute_score"))
    function, name = get_reward_fn(data_source), f'of data_source "{data_source}"'
    if inspect.isclass(function):
        return RewardFunction(LoadedOnce(function, settings or {}), name)
    return RewardFunction(function, name, settings)
