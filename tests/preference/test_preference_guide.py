"""The guide, taken literally: its file is saved, its settings are used, and the command trains with it."""

import re

import pytest
import torch
from e2e_runs import ROOT, metrics, run_here, settings

pytestmark = pytest.mark.timeout(1500)  # a whole run, on a machine that may be busy

GUIDE = ROOT / "docs" / "integrating_a_new_direct_preference_algorithm_for_diffusion_model.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), flags=re.S)


def test_the_guides_file_trains(tmp_path, monkeypatch):
    (source,) = blocks("python")
    (tmp_path / "reward_weighted.py").write_text(source)
    command = blocks("bash")[0].replace("\\\n", " ").split()
    given = [word for word in command[3:] if not word.endswith("...")]
    arguments = settings(tmp_path / "run", *given, "trainer.total_training_steps=2", "trainer.val_before_train=false")
    run_here(arguments, tmp_path, monkeypatch)
    found = metrics(tmp_path / "run")
    assert found[1]["actor/loss"] > 0 and found[1]["actor/weight_mean"] > 0 and found[2]["actor/kl_loss"] > 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert "timestep_distribution: logit_normal" in config and "temperature: 0.5" in config


def test_the_guides_loss_is_its_formula(tmp_path, monkeypatch):
    (source,) = blocks("python")
    (tmp_path / "reward_weighted_here.py").write_text(source.replace('"reward_weighted"', '"reward_weighted_here"'))
    monkeypatch.syspath_prepend(tmp_path)
    import reward_weighted_here as module

    from verl_omni.config import DiffusionActorConfig, DiffusionLossConfig

    config = DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig("reward_weighted_here", extra={"temperature": 0.5})
    )
    v, x0, eps, ref = torch.randn(4, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    advantages = torch.tensor([0.3, -0.2, 1.0], dtype=torch.float64)
    loss, _ = module.RewardWeightedLoss.compute_loss(
        velocity=v, clean_latents=x0, noise=eps, advantages=advantages, ref_velocity=ref, config=config
    )
    rows = [
        torch.exp(advantages[i] / 0.5) * ((v[i] - eps[i] + x0[i]) ** 2).mean() + 0.01 * ((v[i] - ref[i]) ** 2).mean()
        for i in range(3)
    ]
    assert loss.item() == pytest.approx(sum(rows).item() / 3, rel=1e-12)


def test_names_in_the_guide_exist():
    """Every `algorithm.*` knob and every velocity that the guide promises is there."""
    from verl_omni.algorithms.forward_process import SIGMA_DISTRIBUTIONS
    from verl_omni.config.keys import known_keys
    from verl_omni.workers.columns import DECLARED

    text = GUIDE.read_text()
    knobs = set(re.findall(r"`(algorithm\.[a-z_]+)", text))
    assert len(knobs) >= 6 and knobs <= known_keys()
    levels = {name for name, column in DECLARED.items() if column.per == "level"}
    assert set(re.findall(r"`([a-z]+_velocity)`", text)) <= levels
    assert all(f"`{name}`" in text for name in SIGMA_DISTRIBUTIONS)
