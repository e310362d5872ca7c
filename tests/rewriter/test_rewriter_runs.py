"""Whole runs with a rewriter before the generator: both learn, or one of them; all of it goes on from a checkpoint."""

import json
import shutil

import pytest
import torch
from e2e_runs import drawn_again, metrics, run_here, settings
from safetensors.torch import load_file
from tiny_language_model import REWRITER, language_model_folder, rewriting
from tiny_models import tiny_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_omni.agent_loop.rewriting import longest_that_fits, read_text
from verl_omni.report.report import write_report
from verl_omni.workers import diffusion_worker

GENERATOR = "transformer/diffusion_pytorch_model.safetensors"


def trained_language_model(run) -> dict[str, torch.Tensor]:
    return load_file(run / "global_step_3/rewriter/export/model.safetensors")


def is_as_it_was(run) -> tuple[bool, bool]:
    """(the generator, the rewriter)."""
    pairs = [
        (load_file(tiny_checkpoint() / GENERATOR), load_file(run / "global_step_3/export" / GENERATOR)),
        (load_file(language_model_folder() / "model.safetensors"), trained_language_model(run)),
    ]
    return tuple(all(torch.equal(value.float(), after[name].float()) for name, value in before.items())
                 for before, after in pairs)  # fmt: skip


def test_both_learn_and_a_resumed_run_is_the_same(tmp_path, monkeypatch):
    folder, arguments = tmp_path / "run", rewriting(f"{REWRITER}.top_p=0.9", "trainer.save_freq=1")
    arguments = settings(folder, *arguments)
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(folder)
    for step in (1, 2, 3):
        assert told[step]["actor/rewriter/first_ratio_max_dev"] < 1e-5
        assert told[step]["actor/first_ratio_max_dev"] < 1e-6
        assert told[step]["actor/rewriter/grad_norm"] > 0 < told[step]["actor/grad_norm"]
        assert 1 <= told[step]["actor/rewriter/length"] <= 6 and told[step]["actor/rewriter/entropy"] > 0
    assert is_as_it_was(folder) == (False, False)

    export = folder / "global_step_3/rewriter/export"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    assert model.generation_config.top_k == 3  # the folder's own, as it was
    assert tokenizer.chat_template and len(tokenizer) == model.config.vocab_size

    assert all("written" in row for row in drawn_again(folder, 3)), "the rewriter writes what `sample` draws"

    weights = trained_language_model(folder)
    samples = (folder / "validation/step_3/samples.jsonl").read_text()
    for step in (2, 3):
        shutil.rmtree(folder / f"global_step_{step}")
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(folder) == told
    assert (folder / "validation/step_3/samples.jsonl").read_text() == samples
    assert all(torch.equal(value, weights[name]) for name, value in trained_language_model(folder).items())

    row = json.loads(samples.splitlines()[0])
    assert isinstance(row["written"], str) and row["written"] != row["prompt"]
    write_report(folder, tmp_path / "report.html")
    assert "written: <b>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("train", ["rewriter", "generator"])
def test_one_of_them_learns(tmp_path, monkeypatch, train):
    own = rewriting(f"{REWRITER}.train={train}", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    run_here(settings(tmp_path / "run", *own), tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")[3]
    assert is_as_it_was(tmp_path / "run") == ((True, False) if train == "rewriter" else (False, True))
    assert ("actor/loss" in told) == (train == "generator")
    assert ("actor/rewriter/loss" in told) == (train == "rewriter")


@pytest.mark.parametrize("train", ["both", "rewriter", "generator"])
def test_a_trial_of_the_micro_batch_counts_the_rewriter_and_leaves_out_who_does_not_learn(
    tmp_path, monkeypatch, capfd, train
):
    told, find = [], diffusion_worker.find_micro_batch

    def find_and_tell(engine, data, most, beside=0.0):
        told.append(beside)
        return find(engine, data, most, beside)

    monkeypatch.setattr(diffusion_worker, "find_micro_batch", find_and_tell)
    own = [f"{REWRITER}.train={train}", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=auto"]
    run_here(settings(tmp_path / "run", *rewriting(*own, "trainer.total_training_steps=1")), tmp_path, monkeypatch)
    trained = AutoModelForCausalLM.from_pretrained(language_model_folder(), dtype=torch.float32).parameters()
    gradients = sum(p.nbytes for p in trained)
    # of AdamW the state is twice that
    assert told == {"both": [3 * gradients], "rewriter": [], "generator": [0.0]}[train]
    assert ("Micro-batch: " in "".join(capfd.readouterr())) == (train != "rewriter")


REWARD = """
def compute_score(image, prompt):
    return {"score": 0.25, "seen": prompt}
"""


def test_format_has_a_reward_of_its_own_and_rewards_see_the_prompt_of_the_data(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    # Even or odd: some texts match, some do not.
    asked = [f"{REWRITER}.format='(..)*'", f"{REWRITER}.format_reward=0.5", f"{REWRITER}.train=rewriter"]
    arguments = settings(
        tmp_path / "run", *rewriting(*asked), "reward.custom_reward_function.path=reward.py",
        "trainer.total_training_steps=1", "trainer.save_freq=0",
    )  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    rows = [json.loads(r) for r in (tmp_path / "run/training/step_1/samples.jsonl").read_text().splitlines()]
    for row in rows:
        matches = len(row["written"]) % 2 == 0
        assert row["score"] == pytest.approx(0.75 if matches else 0.25)
        assert row["reward_extra_info"] == {"seen": row["prompt"], "format": float(matches)}
    assert metrics(tmp_path / "run")[1]["actor/rewriter/grad_norm"] > 0


def test_what_is_drawn_of_a_text():
    think = r"<think>.*</think>\s*(?P<prompt>.+)"
    assert read_text("<think>why\nnot</think> a cat ", think) == ("a cat", True)
    assert read_text("a cat", think) == ("a cat", False)
    assert read_text("a cat", "a .*") == ("a cat", True)
    assert read_text("a cat", None) == ("a cat", None)

    def limited(text: str) -> None:
        if len(text) > 5:
            raise ValueError("too long")

    assert longest_that_fits("abcdefgh", limited) == "abcde"
    assert longest_that_fits("abc", limited) == "abc"
