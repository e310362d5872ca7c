"""Rewards for what a model makes: images, videos, sounds, texts."""

import asyncio
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.rewards.choice import OWN, Choice, combine, read_choices, rewards_of, weighted
from verl_omni.rewards.judge import with_judge
from verl_omni.rewards.pairwise import Comparisons, beside
from verl_omni.rewards.reward_function import RewardError, RewardFunction, told_of
from verl_omni.rewards.scoring import Failures, Scoring, as_reward_function, described

PLACES = ("group", "burst", "position")  # of a sample: where it belongs, which no reward is told


@register("image")
class ImageRewardManager(RewardManagerBase):
    """Scores single samples, as they finish, with the rewards of `reward.scorers`, or of their data_source, or the
    user's function.

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
        reward = config.reward
        scorers = reward.get("scorers")
        self.choices = read_choices(OmegaConf.to_container(scorers, resolve=True) if scorers else None)
        if reward_router_address is not None:
            served = reward.get("reward_model", {}).get("model_path")
            self.choices = with_judge(self.choices, reward_router_address, served)
        self.failures = Failures(reward.get("on_failure", "drop"), int(reward.get("max_failures", 3)))
        pairwise = reward.get("pairwise") or {}
        self.comparisons: Comparisons | None = None
        if pairwise.get("by"):
            self.comparisons = Comparisons(pairwise.by, pairwise.opponents, self._answer, self._answers)
        self.pools: dict[str, Any] = {}  # label -> a scorer with processes of its own
        self._scorings: dict[str, Scoring] = {}

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """`{"reward_score": float, "reward_extra_info": {...}}` of the last sample in `data`.

        A sample whose reward fails for good has the score NaN and says why under `reward_failure`.
        """
        item = data[-1]
        fields = item.non_tensor_batch
        kept_as = fields if "responses" in fields else item.batch  # pixels of one size, and whatever is no pixels
        sample = {"response": kept_as["responses"]} | told_of(fields)
        sample["group"] = fields.get("uid") or object()  # without a group's name, each image is one
        sample["burst"], sample["position"] = data.meta_info.get("burst"), data.meta_info.get("position")
        if self.comparisons is not None and "compared" in fields:
            return await self.comparisons.share(fields["uid"], fields["compared"], sample)
        return await self._answer(sample)

    async def _answer(self, sample: dict[str, Any]) -> dict[str, Any]:
        """As `run_single`, of a sample, or of two that are compared."""
        group, burst, place = (sample[name] for name in PLACES)
        sample = {name: value for name, value in sample.items() if name not in PLACES}
        chosen = rewards_of(sample["data_source"], self.choices, self.compute_score is not None)
        kind, together = (sample["data_source"], burst), sample
        if "other" in sample:  # each image is in several pairs, whose places nobody has counted
            kind, place = (sample["data_source"], group), None
            together = sample | {"response": beside(sample["response"], sample["other"])}
        asked = [(self._scoring(choice), kind, place) for choice in chosen]
        answers = await asyncio.gather(
            *(scoring.score(sample if scoring.function.compares else together, *w) for scoring, *w in asked),
            return_exceptions=True,
        )
        failure = self._failure(chosen, answers, (group, sample["prompt"]))
        return _unscored(failure) if failure is not None else self._added_up(chosen, answers)

    async def _answers(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """As `_answer`, of all images of a group, which a reward that takes `images` sees in one call."""
        prompt = (samples[0]["group"], samples[0]["prompt"])
        samples = [{name: value for name, value in one.items() if name not in PLACES} for one in samples]
        chosen = rewards_of(samples[0]["data_source"], self.choices, self.compute_score is not None)
        given = await asyncio.gather(*(self._scoring(choice).score_group(samples) for choice in chosen))
        failure = self._failure(chosen, given, prompt)
        if failure is not None:
            return [_unscored(failure) for _ in samples]
        return [self._added_up(chosen, list(answers)) for answers in zip(*given, strict=True)]

    def _failure(self, chosen: list[Choice], answers: list[Any], prompt: tuple) -> str | None:
        """What a reward said that failed, after counting it; whatever else went wrong is raised."""
        failure = None
        for choice, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, RewardError):
                self.failures.failed(choice.label, answer, prompt)
                failure = failure or str(answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self.failures.scored(choice.label)
        return failure

    def _added_up(self, chosen: list[Choice], answers: list[dict[str, Any]]) -> dict[str, Any]:
        answer = combine(chosen, answers) if weighted(self.choices) else answers[0]
        extra = {k: v for k, v in answer.items() if k != "score"}
        return {"reward_score": answer["score"], "reward_extra_info": extra}

    def _scoring(self, choice: Choice) -> Scoring:
        if choice.label not in self._scorings:
            reward, pool = self.config.reward, self.pools.get(choice.label)
            if pool is not None:
                function = RewardFunction(pool, described(choice.label))
            else:
                function = as_reward_function(self.compute_score if choice.name == OWN else None, choice)
            function.timeout = float(reward.get("timeout", function.timeout))
            self._scorings[choice.label] = Scoring(
                function,
                int(reward.get("batch_size", 8)),
                int(reward.get("retries", 0)),
                max(1, choice.processes),
                self.services,
            )
        return self._scorings[choice.label]

    @classmethod
    def assemble_rm_scores(cls, data: DataProto, scores: list[float]) -> torch.Tensor:
        return torch.tensor(scores, dtype=torch.float32).unsqueeze(-1)


def _unscored(failure: str) -> dict[str, Any]:
    return {"reward_score": float("nan"), "reward_extra_info": {}, "reward_failure": failure}
