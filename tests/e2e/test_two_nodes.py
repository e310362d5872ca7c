"""Two machines learn what one does: here two nodes of a Ray that runs already, and a third without devices that starts
the run. It is started in a folder of its own, with paths as people type them there."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from e2e_runs import (
    LEARNING,
    ROOT,
    SCORES_A_STEP,
    SCORES_OF_VALIDATION,
    QuickRun,
    metrics,
    prompts,
    settings,
    user_folder,
    users_environment,
)
from ray.cluster_utils import Cluster
from tiny_models import tiny_checkpoint

from verl_omni.trainer.run_folder import manifest

pytestmark = pytest.mark.timeout(900)

NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def here(tmp_path):
    """A user's folder with all that a run needs."""
    (tmp_path / "prompts").symlink_to(prompts())
    (tmp_path / "model").symlink_to(tiny_checkpoint())
    return user_folder(tmp_path)


def run(cluster: Cluster, folder, *more: str) -> QuickRun:
    typed = [
        *("actor_rollout_ref.model.path=model", "data.train_files=[prompts/train.parquet]"),
        *("data.val_files=prompts/test.parquet", f"ray.address={cluster.address}", "trainer.nnodes=2"),
    ]
    return QuickRun([*settings("run", *LEARNING), *typed, *more], folder, RAY_AUTH_MODE="disabled")


def test_two_nodes_learn_what_one_process_does(cluster, here, uninterrupted):
    """Neither of them ever holds the whole model."""
    begins = ["trainer.total_training_steps=1", "actor_rollout_ref.actor.optim.total_training_steps=6"]
    begins += ["trainer.test_freq=0", "trainer.val_before_train=false"]
    output = run(cluster, here, *begins, "actor_rollout_ref.rollout.gather=blocks").succeed()
    alone, both = metrics(uninterrupted)[1], metrics(here / "run")[1]
    for name in ("critic/rewards/mean", "critic/advantages/max", "actor/grad_norm", "actor/lr"):
        assert both[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), output
    assert manifest.check(here / "run/global_step_1")["global_step"] == 1
    written = {path.name for path in here.iterdir()} - {"__pycache__"}
    assert written == {"prompts", "model", "killer.py", "log.txt", "run"}, "wherever its processes were started"
    assert not list((here / "run").glob(".seen*"))


@pytest.mark.slow
def test_a_folder_that_nodes_do_not_share_is_refused_before_anything_starts(cluster, here):
    """/proc/self/cwd is another folder for each process: here for the command and for those that Ray starts."""
    refused = run(cluster, here, "trainer.default_local_dir=/proc/self/cwd/run")
    assert refused.wait() == 1
    said = refused.output().splitlines()[-1]
    assert said.startswith("error: node ") and "is another folder there than where the run was started" in said
    left = {path.name for path in (here / "run").iterdir()}
    assert left <= {"run.log", "progress.json"}, "the trainer was not started, and no mark is left"


def node_of(cluster: Cluster, name: str) -> str:
    """Where the actor of that class is."""
    actors = cluster.global_state.actor_table(None, None, "ALIVE").values()
    (found,) = {actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] == name}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["without the trainer", "with the trainer"])
def test_a_node_that_dies_is_one_line_and_the_same_command_goes_on(cluster, here, victim):
    (here / "hold").write_text(str(SCORES_OF_VALIDATION + SCORES_A_STEP + 1))  # in the second step
    first = run(cluster, here)
    first.wait_for(here / "held")
    trainer = node_of(cluster, "TaskRunner")
    (node,) = (n for n in cluster.worker_nodes if (n.node_id == trainer) == (victim == "with the trainer"))
    cluster.remove_node(node, allow_graceful=False)
    (here / "go on").touch()
    assert first.wait() == 1
    said = first.output().splitlines()[-1]
    assert re.match(r"error: node [\d.]+ died during the .*, and .* with it; the same command goes on", said), said
    assert f"{here}/run/global_step_1;" in said

    cluster.add_node(**NODE)
    output = run(cluster, here).succeed()
    assert "global_step_1: step 1 of 3 is done" in output
    assert list(metrics(here / "run")) == [0, 1, 2, 3]
    assert manifest.check(here / "run/global_step_3")["global_step"] == 3


# What Slurm's commands do, on one machine: the other node is another Ray on this one.
SLURM = {"srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'}


@pytest.mark.slow
def test_slurm_starts_ray_on_its_nodes_and_the_run(here):
    """examples/multi_node/slurm.sh as sbatch starts it, with two nodes."""
    (here / "bin").mkdir()
    start = f'#!/bin/bash\nshift\nexec {sys.executable} -m verl_omni.trainer.main_diffusion "$@"\n'
    commands = SLURM | {"verl-omni": start}
    for name, text in commands.items():
        (here / "bin" / name).write_text(text)
        (here / "bin" / name).chmod(0o755)
    script = ROOT / "examples/multi_node/slurm.sh"
    environment = users_environment() | {
        "SLURM_JOB_ID": str(os.getpid()), "SLURM_NNODES": "2", "SLURMD_NODENAME": "one",
        "SLURM_CPUS_PER_TASK": "1", "HOME": str(here),
        "PATH": f"{here / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": f"{here}:{ROOT}",
    }  # fmt: skip
    environment.pop("RAY_TMPDIR", None)
    typed = [*settings("run", *LEARNING), "trainer.total_training_steps=1", "trainer.test_freq=0", "trainer.device=cpu"]
    try:
        with (here / "log.txt").open("w") as log:  # no pipe: what outlives the script would keep it open
            where = {"cwd": here, "env": environment, "stdout": log, "stderr": log}
            done = subprocess.run(["bash", script, *typed], **where, timeout=600)
    finally:  # Slurm ends all that a job has started; here nobody does
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_JOB_ID") == environment["SLURM_JOB_ID"]:
                    process.kill()
    assert done.returncode == 0, (here / "log.txt").read_text()[-3000:]
    assert manifest.check(here / "run/global_step_1")["global_step"] == 1
