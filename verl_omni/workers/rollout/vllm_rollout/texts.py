"""Texts from vLLM, in the training worker: `actor_rollout_ref.rewriter.rollout=vllm`.

It has a copy of the language model, which takes the trained weights before each rollout.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from verl_omni.config import RewriterConfig
from verl_omni.utils.errors import RunError
from verl_omni.utils.quiet_libraries import keep_vllm_quiet
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.text_rollout import TextRequest, TextRollout

NAME = "actor_rollout_ref.rewriter.rollout=vllm"
INSTALL = (
    "make vllm-texts (a clone, on a CPU), or pip install 'verl-omni[vllm-omni]' in an environment of its own (CUDA)"
)
PROMPT_TOKENS = 1024  # that there is room for, in the cache of each text
BLOCK = 32  # tokens: every attention kernel of vLLM can do with it
# The engine stays in this process; on a CPU it leaves the threads of training where they are.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def missing() -> str | None:
    """What of vLLM is not here. Imports nothing."""
    found = find_spec("vllm")
    if found is None or found.origin is None:
        return "vllm is not installed here"
    if not torch.accelerator.is_available() and not Path(found.origin).with_name("_C.abi3.so").is_file():
        return "vllm is installed here without its kernels for the CPU"
    return None


def longest_text(config: RewriterConfig, model: Any) -> int:
    """Tokens of a prompt and its text that there is room for; `model` is its config of transformers."""
    most = getattr(model.get_text_config(), "max_position_embeddings", None)
    return min(filter(None, (PROMPT_TOKENS + config.max_new_tokens, most)))


def too_long(tokens: int, config: RewriterConfig, longest: int) -> str | None:
    """What is wrong with a prompt of so many tokens."""
    if tokens + config.max_new_tokens <= longest:
        return None
    return (
        f"{NAME}: a prompt of {tokens} tokens, with {config.max_new_tokens} more "
        f"(actor_rollout_ref.rewriter.max_new_tokens), is longer than the {longest} that there is room for; shorten "
        "it, or set actor_rollout_ref.rewriter.rollout=transformers"
    )


class VllmTextRollout(TextRollout):
    """Requests of a block are written together, and each draws from random numbers of its own."""

    same_arithmetic = False
    compared = "in vLLM and in transformers"

    def __init__(self, config: RewriterConfig, engine: TrainingEngine, tokenizer: Any, max_num_seqs: int):
        super().__init__(config, engine.module, tokenizer, engine.device, engine.autocast, max_num_seqs)
        self.longest = longest_text(config, engine.module.config)
        self.llm = build(engine.model_config.path, engine.dtype, self.longest, max_num_seqs)
        self.model = self.llm.llm_engine.model_executor.driver_worker.get_model()

    @contextlib.contextmanager
    def holding(self, engine: TrainingEngine) -> Iterator[None]:
        self.take(engine.get_per_tensor_param(dtype=engine.dtype)[0])
        yield

    @torch.no_grad()
    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """All of the model's: vLLM would write on with what it is not given."""
        left = {name for name, _ in self.model.named_parameters()} - set(self.model.load_weights(weights))
        if left:
            raise RunError(
                f"{NAME}: of the trained weights vLLM found none for {len(left)} of its own, such as {min(left)}; set "
                "actor_rollout_ref.rewriter.rollout=transformers"
            )

    def write_batch(self, requests: list[TextRequest]) -> list[RolloutOutput]:
        from vllm import SamplingParams

        prompts = [self.ids_of(request) for request in requests]
        for prompt in prompts:
            if line := too_long(len(prompt), self.config, self.longest):
                raise RunError(line)
        asked = [
            SamplingParams(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=self.config.max_new_tokens,
                stop_token_ids=self.ends,
                ignore_eos=True,  # but for those
                logprobs=0,  # of the token that was drawn
                detokenize=False,
            )
            for request in requests
        ]
        written = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        return [
            self._answer(prompt, answer.outputs[0], request)
            for prompt, answer, request in zip(prompts, written, requests, strict=True)
        ]

    def _answer(self, prompt: list[int], written: Any, request: TextRequest) -> RolloutOutput:
        ids = list(written.token_ids)
        log_probs = [told[token].logprob for token, told in zip(ids, written.logprobs, strict=True)]
        own = torch.tensor(ids, device=self.device)
        trajectory = {
            "text_prompt_ids": torch.tensor(prompt, device=self.device),
            "text_ids": own,
            "text_log_probs": torch.tensor(log_probs, device=self.device),
        }
        return RolloutOutput(self.response(own, request), trajectory, version=self.version)


def build(path: str, dtype: torch.dtype, longest: int, max_num_seqs: int) -> Any:
    """vLLM with the model of a folder, without its weights, and a cache for so many texts."""
    keep_vllm_quiet()
    before = dict(os.environ)
    os.environ.update(IN_PROCESS)
    from vllm import LLM
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = computes_with_its_weight
    set_num_threads = torch.set_num_threads
    try:
        with torch.random.fork_rng():
            return LLM(
                model=os.path.expanduser(path),
                dtype=str(dtype).removeprefix("torch."),
                load_format="dummy",  # the trained ones come before the first text
                skip_tokenizer_init=True,
                generation_config="vllm",  # nothing of the folder's: penalties would change what is sampled
                logprobs_mode="processed_logprobs",  # of what a token is drawn from
                enforce_eager=True,  # what may be compiled in this process is said for the blocks that are trained
                enable_prefix_caching=False,  # it would outlive the weights
                max_num_seqs=max_num_seqs,
                max_model_len=longest,
                block_size=BLOCK,
                num_gpu_blocks_override=max_num_seqs * -(-longest // BLOCK) + 1,  # one of them is never used
                kv_cache_memory_bytes=1,  # the line before says it
                gpu_memory_utilization=0.01,  # training has the rest
                disable_log_stats=True,
                seed=0,
            )
    finally:
        torch.set_num_threads = set_num_threads  # its CPU worker puts one there that does nothing
        for name in IN_PROCESS:
            os.environ.pop(name)
            if name in before:
                os.environ[name] = before[name]


def computes_with_its_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """On a CPU vLLM would pack the weights that a layer begins with, and compute with those whatever comes after."""
    layer.cpu_linear = torch.nn.functional.linear
