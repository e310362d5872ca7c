"""Two processes learn what one does, where a step draws, compares or learns in another way than most: the same weights.

The real command, on a Ray of its own; test_two_processes.py looks at everything else of such a run.
"""

from pathlib import Path

import pytest
import torch
from e2e_runs import QuickRun, metrics, run_here, settings
from preference_cases import make_engine
from safetensors.torch import load_file
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

ROLLOUT, MODEL, OWN = "actor_rollout_ref.rollout", "actor_rollout_ref.model", "reward.custom_reward_function.path"
# Coarse, so that a pixel that rounds the other way changes no reward.
BRIGHTNESS = """
def bright(image):
    pixels = list(image.convert("L").getdata())
    return round(sum(pixels) / len(pixels) / 255, 2)
"""
REWARDS = {
    "score": BRIGHTNESS + "def compute_score(image):\n    return bright(image)\n",
    "pair": BRIGHTNESS + "def compute_score(image, other):\n"
    "    return 0.5 if bright(image) == bright(other) else float(bright(image) > bright(other))\n",
}
BRANCHES = [f"{MODEL}.algorithm=tempflow_grpo", f"{ROLLOUT}.algo.branches=2"]
IN_PAIRS = ["reward.pairwise.by=pair", "reward.num_workers=2"]  # a group comes to one of two processes
# The reward, and settings.
CASES = {
    "branches in pairs": ("pair", [*BRANCHES, *IN_PAIRS]),
    "pool": ("score", [f"{ROLLOUT}.pool.size=6", f"{ROLLOUT}.pool.num_inference_steps=2", f"{ROLLOUT}.n=2"]),
    "by score": ("score", ["reward.pairwise.by=score", "reward.num_workers=2"]),
    "opd_forward": ("score", [f"{MODEL}.algorithm=opd_forward", f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8"]),
}
SELDOM = ("by score", "opd_forward")  # of which cheaper tests show the parts


def arguments(case: str, folder: Path) -> list[str]:
    reward, own = CASES[case]
    (folder / "reward.py").write_text(REWARDS[reward])
    teacher = [f"actor_rollout_ref.actor.teacher.path={folder / 'teacher/export'}"] * (case == "opd_forward")
    return settings(
        "run", *own, *teacher, f"{OWN}=reward.py", "data.val_files=null", "trainer.total_training_steps=2",
        "trainer.save_freq=2", "actor_rollout_ref.actor.optim.lr=1e-3",
        # With the usual 1e-8 an element whose gradient is rounding noise moves by a whole learning rate.
        "actor_rollout_ref.actor.optim.eps=1e-3",
    )  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    files = sorted((run / "global_step_2/export").rglob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SELDOM else []) for case in CASES]
)
def test_two_processes_learn_what_one_does(case, tmp_path, monkeypatch, process_group):
    if case == "opd_forward":
        make_engine(tiny_checkpoint(), "awm", lora=True).save_checkpoint(str(tmp_path / "teacher"))
    run = QuickRun([*arguments(case, tmp_path), "trainer.default_local_dir=two", "trainer.n_gpus_per_node=2"], tmp_path)
    run_here(arguments(case, tmp_path), tmp_path, monkeypatch)
    run.succeed()
    one, two = metrics(tmp_path / "run"), metrics(tmp_path / "two")
    assert one[1]["actor/grad_norm"] > 0
    for name in one[1]:
        assert two[1][name] == pytest.approx(one[1][name], rel=1e-3, abs=1e-5), name
    one, two = weights(tmp_path / "run"), weights(tmp_path / "two")
    assert one.keys() == two.keys() and one
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
