"""A whole run with VeOmni, in the words that documents have for it, which FSDP2 goes on with."""

from pathlib import Path

import pytest
from e2e_runs import Run, metrics, run_here, settings
from test_toy_engine import ALIKE

ACTOR = "actor_rollout_ref.actor"
DOCUMENTED = [
    "diffusion/model_engine=veomni_diffusion",
    f"{ACTOR}.strategy=veomni",
    f"{ACTOR}.veomni_config.strategy=veomni",
    "actor_rollout_ref.ref.veomni_config.strategy=veomni",
]
SETTINGS = ["data.val_files=null", f"{ACTOR}.use_kl_loss=true", "trainer.save_freq=1", *ALIKE]
FIRST = "trainer.total_training_steps=2"


def check(run: Path) -> None:
    found = metrics(run)
    assert list(found) == [1, 2, 3]
    for step in found.values():
        assert step["actor/first_ratio_max_dev"] == 0 and step["actor/grad_norm"] > 0


def test_a_run_goes_on_with_fsdp2(tmp_path, monkeypatch, capsys):
    run_here(settings("run", *SETTINGS, FIRST, *DOCUMENTED), tmp_path, monkeypatch)
    run_here(settings("run", *SETTINGS, "diffusion/model_engine=fsdp2_diffusion"), tmp_path, monkeypatch)
    assert "Resuming from run/global_step_2" in capsys.readouterr().out
    check(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_train_and_fsdp2_goes_on_with_one(tmp_path):
    starts = [[FIRST, *DOCUMENTED, "trainer.n_gpus_per_node=2"], [f"{ACTOR}.strategy=fsdp2"]]
    for more in starts:
        run = Run([*settings("run", *SETTINGS), *more], tmp_path)
        assert run.wait() == 0, run.output()[-4000:]
    check(tmp_path / "run")
