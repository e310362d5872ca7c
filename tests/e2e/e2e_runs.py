"""Runs of the real command on a tiny-random Qwen-Image, as a user types it."""

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from tiny_models import tiny_checkpoint

ROOT = Path(__file__).parents[2]
LIMIT = 240  # seconds after which a run hangs


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


class Run:
    """One start of the command in a session of its own, so that a test can kill all of it."""

    def __init__(self, arguments: list[str], folder: Path, **env: str):
        self.log = folder / "log.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-m", "verl_omni.trainer.main_diffusion", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)} | env,
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

    def output(self) -> str:
        return self.log.read_text()

    def succeed(self) -> str:
        code = self.wait()
        assert code == 0, self.output()[-5000:]
        return self.output()


def metrics(run_dir: Path) -> dict[int, dict[str, float]]:
    """By step, without what a clock measures."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    timed = ("timing", "perf/")
    return {line["step"]: {k: v for k, v in line["data"].items() if not k.startswith(timed)} for line in lines}
