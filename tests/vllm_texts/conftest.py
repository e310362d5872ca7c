"""These tests need the environment of `make vllm-texts`."""

import pytest
import torch
from tiny_language_model import tokenizer_of_texts

from verl_omni.testing.tiny_text import language_model
from verl_omni.workers.rollout.vllm_rollout.texts import missing

if missing() is not None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def in_a_process_group(process_group):
    """One rank, as engines expect."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """vLLM's kernels for the CPU know no head of fewer than 32 numbers."""
    own, tokenizer = tmp_path_factory.mktemp("writer"), tokenizer_of_texts()
    torch.manual_seed(0)
    model = language_model(tokenizer, hidden_size=128)
    model.generation_config.update(top_k=3, repetition_penalty=1.5, do_sample=True)  # nobody may listen to this
    model.save_pretrained(own)
    tokenizer.save_pretrained(own)
    return own
