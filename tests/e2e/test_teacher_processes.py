"""Teachers in processes of their own, on a real Ray: the numbers of a run without any, until one of them dies."""

import re
import shutil

import pytest
import torch
from e2e_runs import QuickRun, metrics, run_here, settings
from safetensors.torch import load_file, save_file
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
# When two steps are saved, the reward function finds the process that holds the teacher and kills it, once.
KILL_THE_TEACHER = """
import os, pathlib, signal

HERE = pathlib.Path(__file__).parent

def compute_score(image):
    if (HERE / "apart/global_step_2").exists() and not (HERE / "killed").exists():
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                title = pathlib.Path(f"/proc/{pid}/cmdline").read_text()
                mine = str(HERE) in pathlib.Path(f"/proc/{pid}/environ").read_text()
            except OSError:
                continue
            if mine and "TeacherWorker" in title:
                (HERE / "killed").write_text(pid)
                os.kill(int(pid), signal.SIGKILL)
    pixels = image.convert("L").getdata()
    return sum(pixels) / len(pixels) / 255
"""


def test_a_teacher_that_dies_ends_a_run_that_goes_on(tmp_path, monkeypatch, process_group):
    (tmp_path / "reward.py").write_text(KILL_THE_TEACHER)
    shutil.copytree(tiny_checkpoint(), tmp_path / "teacher")
    state, generator = load_file(tmp_path / "teacher" / WEIGHTS), torch.Generator().manual_seed(3)
    moved = {name: value + 0.02 * torch.randn(value.shape, generator=generator) for name, value in state.items()}
    save_file(moved, tmp_path / "teacher" / WEIGHTS)

    def arguments(run: str, *more: str) -> list[str]:
        return settings(
            run, f"{MODEL}.algorithm=opd", f"{ACTOR}.teacher.path={tmp_path / 'teacher'}", f"{MODEL}.lora_rank=4",
            f"{ACTOR}.optim.lr=0.01", "reward.custom_reward_function.path=reward.py", "data.val_files=null",
            "trainer.save_freq=1", *more,
        )  # fmt: skip

    own_process = arguments("apart", f"{ACTOR}.teacher.n_gpus_per_node=1")
    run = QuickRun(own_process, tmp_path)
    run_here(arguments("beside"), tmp_path, monkeypatch)
    assert run.wait() > 0
    *_, last = run.output().splitlines()
    killed = (tmp_path / "killed").read_text()
    died = rf"error: teacher 0 \(pid {killed}\) died during the .+ of step 3: it was killed, or it crashed; the same"
    assert re.match(f"{died} command goes on from apart/global_step_2", last), last
    assert "Traceback" not in run.output()
    beside, apart = metrics(tmp_path / "beside"), metrics(tmp_path / "apart")
    assert apart == {step: beside[step] for step in (1, 2)} and apart[2]["actor/teacher_kl"] > 0
    run_here(own_process, tmp_path, monkeypatch)
    assert metrics(tmp_path / "apart") == beside
