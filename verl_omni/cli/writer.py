"""The rewriter of a run: it writes what is drawn, as in the run's validation."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import torch

from verl_omni.agent_loop.rewriting import longest_that_fits, read_text
from verl_omni.cli.trained import Weights
from verl_omni.config import DiffusionModelConfig, RewriterConfig
from verl_omni.pipelines.causal_lm import load_tokenizer, writer_of
from verl_omni.utils.seeds import derive_seed
from verl_omni.workers.rollout.text_rollout import TextRequest, TextRollout


class Writer:
    def __init__(self, config: RewriterConfig, folder: Path, device: torch.device, dtype: torch.dtype):
        self.config = config
        architecture, adapter = writer_of(str(folder))
        module = adapter.load_module(DiffusionModelConfig(path=str(folder), architecture=architecture), dtype)
        self.rollout = TextRollout(
            config, module.to(device), load_tokenizer(str(folder)), device, contextlib.nullcontext, max_num_seqs=1
        )

    @classmethod
    def of(cls, weights: Weights, device: torch.device, dtype: torch.dtype) -> Optional["Writer"]:
        """None where the run had none, or one of no texts; a model alone has none either."""
        settings = weights.setting("actor_rollout_ref.rewriter", {})
        if not settings.get("path"):
            return None
        if weights.rewriter is None:
            raise FileNotFoundError(
                f"{weights.export} was trained with a rewriter before it, whose weights are not beside it: name the "
                "checkpoint, RUN/global_step_N, which has both"
            )
        if writer_of(str(weights.rewriter))[1].drawn_by is not None:  # the model's own folder has one that writes them
            return None
        return cls(RewriterConfig(**settings), weights.rewriter, device, dtype)

    def write(
        self, prompts: Sequence[str], seeds: Sequence[int], reads: Sequence[Callable[[str], Any]]
    ) -> tuple[list[str], list[dict[str, str]]]:
        """What is drawn for each prompt, and what samples.jsonl is to say of it. `reads` raise where a text is long."""
        requests = [
            TextRequest(prompt, derive_seed(seed, "text"), self.config.val_temperature)
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        texts, told = [], []
        for answer, read in zip(self.rollout.write_batch(requests), reads, strict=True):
            text, _ = read_text(answer.response, self.config.format)
            texts.append(longest_that_fits(text, read))
            told.append({"written": answer.response} | ({"cut_to": texts[-1]} if texts[-1] != text else {}))
        return texts, told
