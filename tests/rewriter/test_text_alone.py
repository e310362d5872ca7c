"""A language model without a generator: its texts are scored and learned from, by the same trainer."""

import json

import torch
from e2e_runs import metrics, run_here, settings
from safetensors.torch import load_file
from tiny_language_model import REWRITER, language_model_folder, rewriting
from transformers import AutoModelForCausalLM

REWARD = """
def compute_score(text, prompt):
    return {"score": text.count("a") / 10, "length": len(text)}
"""


def test_it_learns_from_the_reward_of_its_texts(tmp_path, monkeypatch):
    (tmp_path / "reward.py").write_text(REWARD)
    without = [one for one in settings(tmp_path / "run") if not one.startswith("actor_rollout_ref.model.path")]
    arguments = [
        *without, *rewriting(f"{REWRITER}.loss=gspo", f"{REWRITER}.lr=0.02", f"{REWRITER}.clip_ratio=0.5"),
        "actor_rollout_ref.rollout.n=16", "trainer.total_training_steps=12", "data.val_files=null",
        "reward.custom_reward_function.path=reward.py", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert all(told[step]["actor/rewriter/first_ratio_max_dev"] < 1e-5 for step in told)
    rewards = [told[step]["critic/rewards/mean"] for step in sorted(told)]
    assert sum(rewards[-3:]) > sum(rewards[:3])
    kept = [json.loads(line) for line in (tmp_path / "run/training/step_1/samples.jsonl").read_text().splitlines()]
    assert all(row["kind"] == "text" and row["reward_extra_info"]["length"] == len(row["text"]) for row in kept)

    export = tmp_path / "run/global_step_12/rewriter/export"
    before, after = load_file(language_model_folder() / "model.safetensors"), load_file(export / "model.safetensors")
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
    assert not (tmp_path / "run/global_step_12/state").exists()
    AutoModelForCausalLM.from_pretrained(export)
