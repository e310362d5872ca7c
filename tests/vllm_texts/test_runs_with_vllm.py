"""A whole run whose prompts vLLM writes."""

import json
import shutil

import pytest
import torch
from e2e_runs import metrics, run_here, settings
from safetensors.torch import load_file
from tiny_language_model import REWRITER

WRITTEN = "global_step_3/rewriter/export/model.safetensors"


def rewriting(folder, *overrides: str) -> list[str]:
    own = {"path": folder, "rollout": "vllm", "max_new_tokens": 6, "micro_batch_size_per_gpu": 3, "lr": 0.01}
    return [*(f"{REWRITER}.{name}={value}" for name, value in own.items()), *overrides]


@pytest.mark.slow
def test_both_learn_and_a_resumed_run_is_the_same(tmp_path, monkeypatch, folder):
    run = tmp_path / "run"
    arguments = settings(run, *rewriting(folder, "trainer.save_freq=1"))
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(run)
    for step in (1, 2, 3):
        assert told[step]["actor/rewriter/first_ratio_max_dev"] < 1e-5  # vLLM's to those of training
        assert told[step]["actor/first_ratio_max_dev"] < 1e-6
        assert told[step]["actor/rewriter/grad_norm"] > 0 < told[step]["actor/grad_norm"]
    before, weights = load_file(folder / "model.safetensors"), load_file(run / WRITTEN)
    assert any(not torch.equal(value, weights[name]) for name, value in before.items())

    samples = (run / "validation/step_3/samples.jsonl").read_text()
    for step in (2, 3):
        shutil.rmtree(run / f"global_step_{step}")
    (run / "latest_checkpointed_iteration.txt").write_text("1")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(run) == told
    assert (run / "validation/step_3/samples.jsonl").read_text() == samples
    assert all(torch.equal(value, weights[name]) for name, value in load_file(run / WRITTEN).items())
    assert all(json.loads(line)["written"] for line in samples.splitlines())
