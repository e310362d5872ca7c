"""Requests that an agent loop names are trained on: one, another, or both, which is the mean of the two updates."""

import shutil

import pytest
import torch
from e2e_runs import ROOT, metrics, run_here, settings
from safetensors.torch import load_file

SETTINGS = (
    *("actor_rollout_ref.model.external_lib=two_turns", "actor_rollout_ref.rollout.agent.default_agent_loop=two_turns"),
    *("data.val_files=null", "trainer.total_training_steps=1", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
    *("actor_rollout_ref.actor.optim.optimizer=SGD", "actor_rollout_ref.actor.optim.lr=1.0"),
    *("actor_rollout_ref.actor.optim.weight_decay=0", "actor_rollout_ref.actor.optim.clip_grad=0"),
    "reward.custom_reward_function.path=reward.py",
)
REWARD = """
def compute_score(image):
    pixels = image.convert("L").getdata()
    return sum(pixels) / len(pixels) / 255
"""


def trained(folder, monkeypatch, turns: str, *more: str) -> tuple[dict, dict[str, torch.Tensor]]:
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    shutil.copy(ROOT / "tests/documented/two_turns.py", folder)
    monkeypatch.setenv("TRAINED_TURNS", turns)
    run_here(settings("run", *SETTINGS, *more), folder, monkeypatch)
    (weights,) = (folder / "run/global_step_1/export").rglob("*.safetensors")
    return metrics(folder / "run")[1], load_file(weights)


def test_both_are_the_mean_of_the_two(tmp_path, monkeypatch, process_group):
    first, one = trained(tmp_path / "first", monkeypatch, "0")
    second, other = trained(tmp_path / "second", monkeypatch, "1")
    both, mean = trained(tmp_path / "both", monkeypatch, "0,1")
    assert first["critic/rewards/mean"] == second["critic/rewards/mean"] == both["critic/rewards/mean"]
    assert both["actor/first_ratio_max_dev"] < 1e-6
    assert first["actor/grad_norm"] != second["actor/grad_norm"]
    moved = max((one[name] - other[name]).abs().max().item() for name in one)
    assert moved > 1e-4
    for name in one:
        torch.testing.assert_close(mean[name], (one[name] + other[name]) / 2, atol=moved * 1e-3, rtol=0)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("algorithm.timestep_fraction=0.5",), "names 2 requests .* algorithm.timestep_fraction below 1 has no way"),
        (("actor_rollout_ref.model.algorithm=diffusion_nft",), "names 2 requests .* direct preference has no way"),
    ],
)
def test_what_has_no_way_for_several_says_so(tmp_path, monkeypatch, process_group, more, said):
    with pytest.raises(ValueError, match=said):
        trained(tmp_path / "both", monkeypatch, "0,1", *more)
