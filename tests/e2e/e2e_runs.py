"""Runs of the real command on a tiny-random Qwen-Image, as a user types it."""

import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import documented_metrics
import warm
from tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[2]
COMMAND = ["-m", "verl_omni.trainer.main_diffusion"]
LIMIT = 600  # seconds after which a run hangs
SCORES_A_STEP, SCORES_OF_VALIDATION = 8, 2  # of `settings`


# What a user's own module can do in every process of a run: here, end it at a chosen moment, or hold it at one of its
# scores until a test has done something. The files `kill` and `hold` say when.
KILLER = """
import gc, os, pathlib, signal, time

HERE = pathlib.Path(__file__).parent
calls = 0

def kill_if(happens):
    order = HERE / "kill"
    if order.exists() and happens(order.read_text()):
        order.unlink(missing_ok=True)
        os.kill(int((HERE / "driver").read_text()), signal.SIGKILL)

def hold():
    order = HERE / "hold"
    if order.exists() and calls >= int(order.read_text()):
        order.write_text(str(gc.get_freeze_count()))
        order.rename(HERE / "held")
        while not (HERE / "go on").exists():
            time.sleep(0.01)

def compute_score(image, prompt):
    global calls
    calls += 1
    kill_if(lambda moment: moment.startswith("score") and calls >= int(moment.split()[1]))
    hold()
    pixels = image.convert("L").getdata()
    return sum(pixels) / len(pixels) / 255

from verl_omni.workers.engine import checkpoint_io
write = checkpoint_io.export

def export(engine, folder):
    kill_if(lambda moment: moment == "save of " + pathlib.Path(folder).parent.name)
    write(engine, folder)

checkpoint_io.export = export
"""

# A run that has something of everything: LoRA, KL, an average, guidance, a window, a schedule, shuffling.
LEARNING = [
    "actor_rollout_ref.model.external_lib=killer",
    "reward.custom_reward_function.path=killer.py",
    "actor_rollout_ref.model.lora_rank=4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ema_decay=0.5",
    "actor_rollout_ref.actor.optim.lr=0.01",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=linear",
    "actor_rollout_ref.rollout.algo.sde_window_size=2",
    "actor_rollout_ref.rollout.pipeline.true_cfg_scale=2.0",
    "algorithm.timestep_fraction=0.5",
    "actor_rollout_ref.actor.shuffle=true",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "trainer.max_ckpt_to_keep=2",
]


@functools.cache
def prompts() -> Path:
    """A folder with train.parquet and test.parquet, made by the repository's own script."""
    script = ROOT / "tests/special_e2e/create_dummy_diffusion_data.py"
    spec = importlib.util.spec_from_file_location("create_dummy_diffusion_data", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = Path(tempfile.mkdtemp(prefix="dummy-prompts-"))
    module.main(["--output", str(folder), "--num-prompts", "6", "--num-test-prompts", "2"])
    return folder


def settings(run_dir: Path, *overrides: str, model: Path | None = None) -> list[str]:
    """Three steps of two prompts with four images each, 32 x 32 pixels, four denoising steps."""
    return [
        f"actor_rollout_ref.model.path={model or tiny_checkpoint()}",
        f"data.train_files={prompts() / 'train.parquet'}",
        f"data.val_files={prompts() / 'test.parquet'}",
        "data.train_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.max_num_seqs=5",
        "actor_rollout_ref.rollout.pipeline.height=32",
        "actor_rollout_ref.rollout.pipeline.width=32",
        "actor_rollout_ref.rollout.pipeline.num_inference_steps=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=5",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={run_dir}",
        *overrides,
    ]


def user_folder(folder: Path) -> Path:
    """A folder with the module that `LEARNING` names."""
    (folder / "killer.py").write_text(KILLER)
    return folder


def users_environment() -> dict[str, str]:
    """Without what is set for Rays that tests start in their own process."""
    return {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}


for _number in (signal.SIGINT, signal.SIGHUP):  # a shell's background job hands these on as ignored
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)


class Run:
    """One start of the command in a session of its own, so that a test can kill all of it.

    `env` is added to the environment; None takes a variable out of it.
    """

    def __init__(self, arguments: list[str], folder: Path, program: list[str] = COMMAND, **env: str | None):
        self.log = folder / "log.txt"
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
        environment = users_environment() | {"PYTHONPATH": path} | env
        environment = {name: value for name, value in environment.items() if value is not None}
        self.process = self.start([*program, *arguments], folder, environment)

    def start(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen | warm.Fork:
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise AssertionError(f"the run hangs; the end of its output:\n{self.output()[-3000:]}") from None

    def wait_for(self, file: Path) -> None:
        """Until that file is there."""
        end = time.monotonic() + LIMIT
        while not file.exists():
            assert time.monotonic() < end and self.process.poll() is None, self.output()[-3000:]
            time.sleep(0.02)

    def output(self) -> str:
        return self.log.read_text()

    def succeed(self) -> str:
        code = self.wait()
        assert code == 0, self.output()[-5000:]
        return self.output()


class QuickRun(Run):
    """The same in processes that need not import the libraries, those of Ray's workers too: see warm.py.

    test_two_processes.py and test_interrupts.py start the command, and it starts Ray, as a user's does.
    """

    def start(self, arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.Popen | warm.Fork:
        if not warm.WORKS:
            return super().start(arguments, folder, environment)
        return warm.Fork(arguments, folder, environment, self.log.open("w"))


def _go_to(folder: Path, monkeypatch) -> None:
    """As a user does who starts something there. What `KILLER` changes is taken back after the test."""
    from verl_omni.workers.engine import checkpoint_io

    monkeypatch.setattr(checkpoint_io, "export", checkpoint_io.export)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)


def run_here(arguments: list[str], folder: Path, monkeypatch) -> None:
    """A whole run in this process, started in that folder: where what Ray does is not the point."""
    from verl_omni.testing.local_trainer import local_config, local_trainer

    _go_to(folder, monkeypatch)
    local_trainer(local_config(arguments)).fit()


def run_in_a_fork(arguments: list[str], folder: Path) -> None:
    """The same in a process of its own, which can be killed. Its output is in log.txt."""
    from verl_omni.testing.local_trainer import local_config, local_trainer

    with (folder / "log.txt").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    local_trainer(local_config(arguments)).fit()


def command_here(arguments: list[str], folder: Path, monkeypatch, capsys) -> tuple[int, str]:
    """(exit code, output) of the command in this process, started in that folder: for what ends before Ray starts."""
    from verl_omni.trainer import main_diffusion

    def no_ray(*args, **kwargs):
        raise AssertionError("Ray was started")

    monkeypatch.setattr("ray.init", no_ray)
    monkeypatch.setattr("verl_omni.utils.external_lib.registrations", {})  # of other tests in this process
    monkeypatch.setattr("sys.argv", ["verl-omni", *arguments])
    _go_to(folder, monkeypatch)
    capsys.readouterr()
    try:
        main_diffusion.main()
        code = 0
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr()
    return code, said.out + said.err


def assert_nobody_left(folder: Path) -> None:
    """Ray and all workers of a run in that folder have ended, or end by themselves."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        if not any(str(folder) in environment for environment in environments()):
            return
        time.sleep(0.2)
    raise AssertionError("processes of the run are still there")


def environments() -> Iterator[str]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            yield open(f"/proc/{pid}/environ").read()
        except OSError:
            continue


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """By step, without what a clock measures. docs/metrics.md has all of them."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    assert not documented_metrics.unknown(name for line in lines for name in line["data"])
    timed = ("timing", "perf/", "idle/")
    return {line["step"]: {k: v for k, v in line["data"].items() if not k.startswith(timed)} for line in lines}


def back_to(step: int, run_dir: Path) -> None:
    """As if the run had ended after that step: the same command goes on from there."""
    for checkpoint in run_dir.glob("global_step_*"):
        if int(checkpoint.name.removeprefix("global_step_")) > step:
            shutil.rmtree(checkpoint)
    (run_dir / "latest_checkpointed_iteration.txt").write_text(str(step))


def drawn_again(run: Path, step: int, at_once: int = 100) -> list[dict]:
    """`verl-omni sample` with what a run has saved: the files that its validation wrote, whose lines are returned."""
    from verl_omni.agent_loop.outputs import written
    from verl_omni.cli.painter import Painter
    from verl_omni.cli.trained import find_weights

    folder = run / f"validation/step_{step}"
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    painter = Painter(find_weights(run / f"global_step_{step}"), {}, "cpu")
    parts = [rows[i : i + at_once] for i in range(0, len(rows), at_once)]
    away = [" "] * at_once  # the negative prompt of `prompts`
    asked = [([r["prompt"] for r in part], [r["seed"] for r in part], away) for part in parts]
    drawn = [one for part in asked for one in painter.draw(*part)]
    for row, one in zip(rows, drawn, strict=True):
        place = written(one.response, run / "again" / str(row["index"]))
        name = place.get("image") or place["file"]
        assert (run / "again" / name).read_bytes() == (folder / (row.get("image") or row["file"])).read_bytes()
        assert place.keys() <= row.keys() and one.told == {k: row[k] for k in ("written", "cut_to") if k in row}
    return rows
