"""Texts from a language model, with the weights that are trained: transformers' `generate`, a random stream a text."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from verl_omni.config import RewriterConfig
from verl_omni.pipelines.causal_lm import tokenize
from verl_omni.utils.batcher import Batcher
from verl_omni.utils.seeds import derive_seed
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.engine.tokens import packed, token_log_probs
from verl_omni.workers.rollout.base import RolloutOutput


@dataclass
class TextRequest:
    prompt: str
    seed: int
    #: 0: always the likeliest token
    temperature: float
    #: height and width of what will be drawn
    size: tuple[int, int] | None = None


class TextRollout:
    """Requests share forwards, in fixed blocks of a burst, so that a run repeats bit for bit."""

    #: whether its log-probabilities are those of training, but for a rounding that ratios of 1 do not see
    same_arithmetic = True
    #: where it could differ from training
    compared = "with a cache and without"

    def __init__(
        self,
        config: RewriterConfig,
        module: torch.nn.Module,
        tokenizer: Any,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager],
        max_num_seqs: int,
    ):
        self.config, self.module, self.tokenizer, self.device = config, module, tokenizer, device
        self.autocast, self.version = autocast, 0
        self.batcher = Batcher(self.write_batch, max_num_seqs, max_wait_s=0.02)
        ends = module.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        self.ends = [ends] if isinstance(ends, int) else list(ends or ())

    async def write(
        self,
        prompt: str,
        seed: int,
        temperature: float,
        position: tuple | None,
        size: tuple[int, int] | None = None,
    ) -> RolloutOutput:
        """One text for one prompt, and what training needs of it."""
        request = TextRequest(prompt, derive_seed(seed, "text"), temperature, size)
        return await self.batcher.submit(request, key=(temperature, size), position=position)

    def holding(self, engine: TrainingEngine) -> contextlib.AbstractContextManager:
        """With the weights that are trained; inside no rank waits for another's longest text."""
        return engine.whole()

    # ---- what is written, for a relative to override ---------------------------------------------------

    def ids_of(self, request: TextRequest) -> list[int]:
        return tokenize(self.tokenizer, request.prompt, self.config.template, self.config.system)

    def most_tokens(self, request: TextRequest) -> int:
        return self.config.max_new_tokens

    def told(self, requests: list[TextRequest]) -> dict[str, torch.Tensor]:
        """What the model is told beside the tokens."""
        return {}

    def response(self, tokens: torch.Tensor, request: TextRequest) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def beside(self, prompt: list[int], request: TextRequest) -> dict[str, torch.Tensor]:
        """What training needs of a text beside its tokens."""
        return {}

    @torch.no_grad()
    def write_batch(self, requests: list[TextRequest]) -> list[RolloutOutput]:
        from transformers import GenerationConfig, LogitsProcessorList

        prompts = [self.ids_of(request) for request in requests]
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long, device=self.device)
        real = torch.zeros_like(ids)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            real[i, longest - len(prompt) :] = 1
        choice = Choice(requests, self.config.top_p, self.device)
        with self.autocast():
            whole = self.module.generate(
                input_ids=ids,
                attention_mask=real,
                **self.told(requests),
                synced_gpus=False,  # the weights are whole here; ranks with fewer texts would be waited for
                logits_processor=LogitsProcessorList([choice]),
                generation_config=GenerationConfig(
                    max_new_tokens=self.most_tokens(requests[0]),
                    do_sample=False,  # `choice` has drawn already
                    eos_token_id=self.ends or None,
                    pad_token_id=self.ends[0] if self.ends else 0,
                ),
            )
        written = whole[:, longest:]
        log_probs, nuclei = torch.stack(choice.log_probs, 1), choice.nuclei and torch.stack(choice.nuclei, 1)
        outputs = []
        for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            length = self._length(written[i].tolist())
            own = written[i, :length]
            trajectory = {
                "text_prompt_ids": torch.tensor(prompt, device=self.device),
                "text_ids": own.clone(),
                "text_log_probs": log_probs[i, :length].clone(),
                **self.beside(prompt, request),
            }
            if choice.nuclei:
                trajectory["text_nucleus"] = nuclei[i, :length].clone()
            outputs.append(RolloutOutput(self.response(own, request), trajectory, version=self.version))
        return outputs

    def _length(self, tokens: list[int]) -> int:
        """Up to its end, which is a token that was chosen too."""
        return next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))


class Choice:
    """A logits processor after which the likeliest token is one that was drawn, from each text's own random numbers.

    The largest of log p + Gumbel noise is a draw from p. What is beside it in a batch has no part in it.
    """

    def __init__(self, requests: list[TextRequest], top_p: float, device: torch.device):
        self.temperature, self.top_p = requests[0].temperature, top_p
        self.generators = [torch.Generator(device).manual_seed(r.seed) for r in requests]
        self.log_probs: list[torch.Tensor] = []
        self.nuclei: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        chosen = log_probs = token_log_probs(logits, self.temperature or 1.0)
        if self.temperature:
            if self.top_p < 1:
                kept = nucleus(log_probs, self.top_p)
                self.nuclei.append(packed(kept))
                chosen = log_probs = token_log_probs(logits, self.temperature, self.nuclei[-1])
            each = zip(log_probs, self.generators, strict=True)
            chosen = log_probs - torch.stack([torch.empty_like(row).exponential_(generator=g) for row, g in each]).log()
        self.log_probs.append(log_probs.gather(1, chosen.argmax(1, keepdim=True))[:, 0])
        return chosen


def nucleus(log_probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest likeliest tokens that have `top_p` of the probability together."""
    ordered, places = log_probs.exp().sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    return torch.zeros_like(log_probs, dtype=torch.bool).scatter(-1, places, before < top_p)
