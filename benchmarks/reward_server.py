"""Does every score arrive, once and right, from a server that fails, is slow and is killed?

    python -m benchmarks.reward_server [--requests 10000]

Starts `verl-omni serve-reward` with the scorer below, in which every 20th image fails when it is first seen, every
100th takes 0.3 s, and every 2000th longer than the client waits. It is killed (SIGKILL) and started again at 17 % and
at 33 %. The expected scores are computed here, without a server. Prints what went wrong on the way, the server's memory
and the pace; ends with an error where a score is missing, doubled or another.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import psutil
from PIL import Image

from verl_omni.rewards import register_reward
from verl_omni.rewards.scorers import http
from verl_omni.rewards.serving.replica import Replica

TIMEOUT = 10.0  # of the client
RESTARTS = (0.17, 0.33)  # in the middle of a call
STEP = 500  # images of one call of the reward


@register_reward("trial")
class Trial:
    """The mean of the pixels, and a fingerprint of image and prompt: an answer for another sample would show."""

    def __init__(self, *, timeout: float = TIMEOUT):
        self.timeout, self.seen = timeout, Counter()

    def __call__(self, images: list, ground_truths: list, prompts: list[str], extra_infos: list[dict]) -> list[dict]:
        for info in extra_infos:
            index = info["index"]
            self.seen[index] += 1
            if index % 20 == 7 and self.seen[index] <= 2:  # in its batch, and then alone
                raise RuntimeError(f"injected for image {index}")
            if index % 100 == 13:
                time.sleep(0.3)
            if index % 2000 == 19 and self.seen[index] == 1:
                time.sleep(self.timeout + 1)
        return [right_answer(image, prompt) for image, prompt in zip(images, prompts, strict=True)]


def right_answer(image: Image.Image, prompt: str) -> dict:
    array = np.asarray(image)
    return {"score": float(array.mean()), "is": hashlib.sha256(array.tobytes() + prompt.encode()).hexdigest()}


def picture(index: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(index).integers(0, 256, (64, 64, 3), dtype=np.uint8))


class Server:
    """The command in a process of its own."""

    def __init__(self, port: int = 0):
        command = [sys.executable, "-m", "verl_omni.cli.main", "serve-reward", "trial", "--port", str(port)]
        self.process = subprocess.Popen(
            [*command, "--external-lib", "benchmarks.reward_server"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path])},
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in self.process.stderr:
            if line.startswith("serving"):
                self.address = line.split()[-1]
                return
        sys.exit("error: the server did not start")

    def megabytes(self) -> float:
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    def killed_and_started(self) -> "Server":
        self.process.kill()
        self.process.wait()
        return Server(int(self.address.rpartition(":")[2]))


class Trip:
    """Counts what comes and what fails, and kills the server when it is time."""

    def __init__(self, requests: int):
        self.server, self.requests = Server(), requests
        self.accepted, self.failures, self.memory = 0, Counter(), []
        threading.Thread(target=self.watch, daemon=True).start()

    def read(self, answer: dict) -> dict:
        score = http.read_score(answer)
        self.accepted += 1
        return score

    def watch(self) -> None:
        restarts, tenths = [share * self.requests for share in RESTARTS], list(range(1, 10))
        while tenths:
            time.sleep(0.01)
            if restarts and self.accepted >= restarts[0]:
                restarts.pop(0)
                self.note("killed")
                self.server = self.server.killed_and_started()  # requests on their way are lost with it
            elif self.accepted * 10 >= tenths[0] * self.requests:
                tenths.pop(0)
                self.note()

    def note(self, what: str = "") -> None:
        self.memory.append((self.accepted, self.server.process.pid, self.server.megabytes(), what))

    def count(self, words: str) -> None:
        self.failures[re.sub(r"\d{4,}|image \d+|0x\w+", "...", words)[:90]] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="%(default)s")
    requests = parser.parse_args().requests
    trip = Trip(requests)
    failed = Replica.failed
    Replica.failed = lambda replica, words, down=False: (trip.count(words), failed(replica, words, down))
    ask = http.HttpScorer(
        address=trip.server.address, scorer="trial", timeout=TIMEOUT, retries=12, concurrency=32, breaker_pause=1.0
    )
    answers, began = [], time.monotonic()
    for first in range(0, requests, STEP):
        indices = range(first, min(first + STEP, requests))
        images, prompts = [picture(i) for i in indices], [f"prompt {i}" for i in indices]
        samples = [
            http.Sample(image, None, p, {"index": i}) for image, p, i in zip(images, prompts, indices, strict=True)
        ]
        bodies = [http.partial(http.encode, sample) for sample in samples]
        answers += ask.client.ask_all(ask.path, bodies, trip.read)
    took = time.monotonic() - began
    trip.note("at the end")
    trip.server.process.terminate()
    code = trip.server.process.wait()
    wrong = [i for i, answer in enumerate(answers) if answer != right_answer(picture(i), f"prompt {i}")]
    print(
        f"{requests} images asked for, {len(answers)} answers, {trip.accepted} accepted, {len(wrong)} wrong {wrong[:5]}"
    )
    print(f"{took:.0f} s, {requests / took:.0f} requests a second; the server ended with {code}")
    for words, count in trip.failures.most_common():
        print(f"{count:6} tries failed: {words}")
    for accepted, pid, megabytes, note in trip.memory:
        print(f"{accepted:6} answered, process {pid}: {megabytes:.1f} MB {note}")
    if wrong or len(answers) != requests or trip.accepted != requests or code:
        sys.exit("error: not every score arrived once and right")


if __name__ == "__main__":
    main()
