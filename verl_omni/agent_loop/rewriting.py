"""Before a sample's agent loop begins, the rewriter writes the prompt that it is given."""

import re
import time
from collections.abc import Callable
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from verl_omni.agent_loop.diffusion_agent_loop import DiffusionAgentLoopWorker
from verl_omni.agent_loop.outputs import DiffusionAgentLoopOutput
from verl_omni.agent_loop.routing import Block
from verl_omni.config import RewriterConfig
from verl_omni.data.open_images import open_images
from verl_omni.pipelines.causal_lm import writer_of
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.rollout.base import RolloutOutput


def agent_loop_worker(config: DictConfig) -> type[DiffusionAgentLoopWorker]:
    """The agent-loop worker that this run needs."""
    if config.actor_rollout_ref.rewriter.path is None:
        return DiffusionAgentLoopWorker
    return RewritingAgentLoopWorker if config.actor_rollout_ref.model.path is not None else WritingAgentLoopWorker


class RewritingAgentLoopWorker(DiffusionAgentLoopWorker):
    """Each sample of a prompt has a text of its own. Rewards see the prompt of the data."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.rewriter: RewriterConfig = OmegaConf.to_object(config.actor_rollout_ref.rewriter)
        self.adapter = DiffusionModelBase.get_class(self.model_config)
        self.writes_images = writer_of(self.rewriter.path)[1].drawn_by is not None

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], row: dict[str, Any], block: Block
    ) -> DiffusionAgentLoopOutput:
        answer = await self._write(sampling_params, row, block)
        if self.writes_images:
            written = [int(token) for token in answer.response.split()]
            output = await super()._run_agent_loop(sampling_params | {"written": written}, row, block)
            self._check_reference(answer, output)
            return output
        text, matches = read_text(answer.response, self.rewriter.format)
        images, limit = open_images(row.get("images")), sampling_params["max_sequence_length"]
        prompt = longest_that_fits(text, lambda part: self.adapter.tokenize(self.tokenizers, part, limit, images))
        output = await super()._run_agent_loop(sampling_params, row | {"prompt": prompt}, block)
        self._check_reference(answer, output)
        output.told = {"written": answer.response} | ({"cut_to": prompt} if prompt != text else {})
        output.format = matches
        return output

    @staticmethod
    def _check_reference(answer: RolloutOutput, output: DiffusionAgentLoopOutput) -> None:
        if answer.reference is not None and output.reference != answer.reference:
            raise ValueError(
                "an agent loop names another request than its first one to be trained on, which a rewriter has no way "
                "for: its text belongs to the first"
            )

    async def _write(self, sampling_params: dict[str, Any], row: dict[str, Any], block: Block) -> RolloutOutput:
        trained = sampling_params.get("keep_trajectory", False)
        asked = {name: row.get(name) for name in ("seed", "position", "place")}
        if self.writes_images:
            asked["size"] = tuple(row.get(name) or sampling_params[name] for name in ("height", "width"))
        asked["temperature"] = self.rewriter.temperature if trained else self.rewriter.val_temperature
        return await self.servers[block.server].write.remote(prompt=row["prompt"], sampling_params=asked)

    async def _score(self, output: DiffusionAgentLoopOutput, row: dict[str, Any]) -> None:
        await super()._score(output, row)
        if output.format is not None and output.reward_score is not None:
            output.reward_score += self.rewriter.format_reward * output.format
            output.reward_extra_info = output.reward_extra_info | {"format": float(output.format)}


class WritingAgentLoopWorker(RewritingAgentLoopWorker):
    """Without a generator: the text is the response, and its tokens are one step."""

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], row: dict[str, Any], block: Block
    ) -> DiffusionAgentLoopOutput:
        answer = await self._write(sampling_params, row, block)
        text, matches = read_text(answer.response, self.rewriter.format)
        one_step = {"all_timesteps": torch.zeros(1), "rollout_log_probs": torch.zeros(1)}
        return DiffusionAgentLoopOutput(
            text,
            [],
            one_step,
            reference=answer.reference,
            version=answer.version,
            told={"written": answer.response} if answer.response != text else {},
            format=matches,
            image_time=time.perf_counter(),
        )


def read_text(text: str, format: str | None) -> tuple[str, bool | None]:
    """(what is drawn, whether the text is as it should be; None where nobody asks)."""
    if format is None:
        return text, None
    found = re.fullmatch(format, text, re.DOTALL)
    inner = found.groupdict().get("prompt") if found else None
    return (text if inner is None else inner.strip()), found is not None


def longest_that_fits(text: str, tokenize: Callable[[str], Any]) -> str:
    """As much of its beginning as the generator's limit of tokens lets in: a long text is no reason to end a run."""

    def fits(length: int) -> bool:
        try:
            tokenize(text[:length])
        except ValueError:
            return False
        return True

    if fits(len(text)):
        return text
    low, high = 0, len(text)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return text[:low]
