"""A tiny language model with a chat template, and the settings of runs that it writes prompts for."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from verl_omni.testing.tiny_text import language_model, qwen_tokenizer

REWRITER = "actor_rollout_ref.rewriter"


def tokenizer_of_texts() -> PreTrainedTokenizerBase:
    return qwen_tokenizer(["user assistant system\n", "a red cat on a green mat, a small house in blue snow"])


@functools.cache
def language_model_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="tiny-language-model-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(0)
    tokenizer = tokenizer_of_texts()
    model = language_model(tokenizer)
    model.generation_config.update(top_k=3, repetition_penalty=1.5, do_sample=True)  # nobody may listen to this
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def rewriting(*overrides: str) -> list[str]:
    """Texts of up to six tokens."""
    return [
        f"{REWRITER}.path={language_model_folder()}",
        f"{REWRITER}.max_new_tokens=6",
        f"{REWRITER}.micro_batch_size_per_gpu=3",
        f"{REWRITER}.lr=0.01",
        *overrides,
    ]
