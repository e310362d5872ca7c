"""The rewriter of a run: it writes what is drawn, as in the run's validation."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from verl_omni.agent_loop.rewriting import longest_that_fits, read_text
from verl_omni.cli.trained import Weights
from verl_omni.config import DiffusionModelConfig, RewriterConfig
from verl_omni.pipelines.causal_lm import load_tokenizer, writer_of
from verl_omni.utils.seeds import derive_seed
from verl_omni.workers.rollout.image_token_rollout import ImageTokenRollout
from verl_omni.workers.rollout.text_rollout import TextRequest, TextRollout


class Written(NamedTuple):
    text: str  # what is drawn
    told: dict[str, str]  # what samples.jsonl is to say of it
    tokens: list[int] | None = None  # of the image, where those are what is written


class Writer:
    def __init__(
        self,
        config: RewriterConfig,
        folder: Path,
        device: torch.device,
        dtype: torch.dtype,
        tokenizers: Mapping[str, Any] | None = None,
    ):
        """`tokenizers` are the generator's, which a model that writes tokens of its images is asked with."""
        self.config = config
        architecture, adapter = writer_of(str(folder))
        self.writes_images = adapter.drawn_by is not None
        module = adapter.load_module(DiffusionModelConfig(path=str(folder), architecture=architecture), dtype)
        kind = functools.partial(ImageTokenRollout, adapter) if self.writes_images else TextRollout
        tokenizer = tokenizers["processor"] if self.writes_images else load_tokenizer(str(folder))
        self.rollout = kind(config, module.to(device), tokenizer, device, contextlib.nullcontext, max_num_seqs=1)

    @classmethod
    def of(
        cls, weights: Weights, device: torch.device, dtype: torch.dtype, tokenizers: Mapping[str, Any]
    ) -> Optional["Writer"]:
        """None where the run had none; a model alone has none either."""
        settings = weights.setting("actor_rollout_ref.rewriter", {})
        if not settings.get("path"):
            return None
        if weights.rewriter is None:
            raise FileNotFoundError(
                f"{weights.export} was trained with a rewriter before it, whose weights are not beside it: name the "
                "checkpoint, RUN/global_step_N, which has both"
            )
        return cls(RewriterConfig(**settings), weights.rewriter, device, dtype, tokenizers)

    def write(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        reads: Sequence[Callable[[str], Any]],
        sizes: Sequence[tuple[int, int]],
    ) -> list[Written]:
        """One for each prompt, which will be drawn in that size. `reads` raise where a text is long."""
        requests = [
            TextRequest(prompt, derive_seed(seed, "text"), self.config.val_temperature, size)
            for prompt, seed, size in zip(prompts, seeds, sizes, strict=True)
        ]
        if self.writes_images:  # those of one size share forwards
            answers = [self.rollout.write_batch([request])[0] for request in requests]
            tokens = ([int(token) for token in answer.response.split()] for answer in answers)
            return [Written(prompt, {}, one) for prompt, one in zip(prompts, tokens, strict=True)]
        written = []
        for answer, read in zip(self.rollout.write_batch(requests), reads, strict=True):
            text, _ = read_text(answer.response, self.config.format)
            fits = longest_that_fits(text, read)
            written.append(Written(fits, {"written": answer.response} | ({"cut_to": fits} if fits != text else {})))
        return written
