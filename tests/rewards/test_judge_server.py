"""The reward `vlm_judge` with a real server of OpenAI's chat completions: `transformers serve` and a tiny model."""

import os
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from e2e_runs import Run, metrics, settings
from PIL import Image
from reward_servers import free_port, until

from verl_omni.rewards import make_scorer
from verl_omni.rewards.serving import client
from verl_omni.rewards.serving.client import RewardServerError

GUARD = 200  # seconds after which something waits for ever: the server starts twice
COUNT = 40
PROMPTS = ["abcd"[i % 4] for i in range(COUNT)]


def plain(seed: int) -> Image.Image:
    colour = np.random.default_rng(seed).integers(0, 256, 3).tolist()
    return Image.new("RGB", (24, 20), tuple(colour))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The folder of the model, and what it says of each image, asked without a server."""
    tiny_judge = pytest.importorskip("tiny_judge")
    pytest.importorskip("openai")  # `transformers serve` needs it
    folder = tmp_path_factory.mktemp("judge")
    tiny_judge.write(folder)
    digits = tiny_judge.digits_of(folder, [plain(i) for i in range(COUNT)], [f"{prompt}?" for prompt in PROMPTS])
    assert len(set(digits)) >= 3, "answers that are all the same would prove little"
    return folder, digits


class Serve:
    """`transformers serve`, which answers from when `/health` does."""

    def __init__(self, folder, port: int):
        command = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(folder)]
        self.log = (folder / "log").open("a")
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
            env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=self.log,
            stderr=self.log,
        )
        self.address = f"http://127.0.0.1:{port}"

    def healthy(self) -> bool:
        assert self.process.poll() is None, "the server has ended"
        try:
            return urllib.request.urlopen(f"{self.address}/health", timeout=GUARD).status == 200
        except OSError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@pytest.mark.slow
def test_forty_images_while_the_server_is_killed(judge, monkeypatch):
    monkeypatch.setattr(client, "LONGEST_PAUSE", 2.0)
    folder, digits = judge
    server = Serve(folder, free_port())
    settings = {"address": f"{server.address}/v1", "model": str(folder), "concurrency": 2}
    try:
        until(server.healthy, GUARD)
        ask = make_scorer(
            "vlm_judge", settings | {"template": "{prompt}?", "parser": "number", "scale": "1..5", "retries": 60}
        )
        answered, some = [], threading.Event()

        def read(answer, of=ask.read):
            answered.append(of(answer))
            if len(answered) == 10:
                some.set()
            return answered[-1]

        ask.read = read
        with ThreadPoolExecutor(1) as pool:
            images = [plain(i) for i in range(COUNT)]
            asked = pool.submit(ask, images, [None] * COUNT, PROMPTS, [{}] * COUNT)
            assert some.wait(GUARD)
            server.kill()
            assert len(answered) < COUNT and not asked.done()
            server = Serve(folder, int(server.address.rpartition(":")[2]))
            answers = asked.result(GUARD)
        assert [answer["score"] for answer in answers] == [(digit - 1) / 4 for digit in digits]
        assert [answer["judge"] for answer in answers] == [str(digit) for digit in digits]
        assert len(answered) == COUNT, "each was read once"

        # What this server does not give, and what it refuses.
        with pytest.raises(RewardServerError, match="no top_logprobs, which parser=yes_no_logits needs"):
            make_scorer("vlm_judge", settings | {"template": "shows_prompt", "retries": 1})(
                [plain(0)], [""], ["a"], [{}]
            )
        with pytest.raises(RewardServerError, match="answers 400 Server is pinned to"):
            make_scorer("vlm_judge", settings | {"model": "another"})([plain(0)], [""], ["a"], [{}])
    finally:
        server.kill()


@pytest.mark.slow
def test_a_run_goes_on_while_its_judge_is_killed(judge, tmp_path):
    """The judge is a server that the run itself started. It is killed in the second step, and comes back."""
    folder, _ = judge
    serve = f"{sys.executable} -c 'from transformers.cli.transformers import main; main()' serve {{model}}"
    run = Run(
        settings(
            tmp_path / "run",
            "reward.scorers=[{name: vlm_judge, template: '{prompt}?', parser: number, scale: 1..5, concurrency: 2}]",
            "reward.reward_model.enable=true",
            f"reward.reward_model.model_path={folder}",
            f'reward.reward_model.command="{serve} --host 0.0.0.0 --port {{port}} --device cpu"',
            "data.val_files=null",
            "trainer.total_training_steps=4",
            "trainer.save_freq=0",
        ),
        tmp_path,
        OMP_NUM_THREADS="1",
    )
    lines = tmp_path / "run/metrics.jsonl"
    until(lambda: run.process.poll() is not None or (lines.is_file() and lines.read_text().count("\n") >= 1), GUARD)
    (server,) = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])
                 and "transformers.cli" in " ".join(p.info["cmdline"]) and "main_diffusion" not in
                 " ".join(p.info["cmdline"])]  # fmt: skip
    server.kill()
    run.succeed()
    steps = metrics(tmp_path / "run")
    assert sorted(steps) == [1, 2, 3, 4]
    for step in steps.values():
        assert step["reward/failed"] == 0 and step["reward/vlm_judge/min"] >= 0 and step["reward/vlm_judge/max"] <= 1
    log = (tmp_path / "run/reward_model_0.log").read_text()
    assert log.count("Started server process") == 2, "it was started again"
