"""Reward servers for tests: one in a thread of this process, and one as the command that a user types."""

import base64
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from PIL import Image

from verl_omni.rewards.serving.server import RewardServer

GUARD = 60  # seconds after which something waits for ever


def picture(seed: int, height: int = 6, width: int = 8) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def mean(image) -> float:
    """Of all pixels of an image or a video."""
    frames = image if isinstance(image, list) else [image]
    return float(np.mean([np.asarray(frame.convert("RGB"), dtype=np.float64) for frame in frames]))


def mean_scorer(images, ground_truths, prompts, extra_infos):
    return [
        {"score": mean(image), "truth": truth, "prompt": prompt, "index": info.get("index", -1)}
        for image, truth, prompt, info in zip(images, ground_truths, prompts, extra_infos, strict=True)
    ]


class Gate:
    """A scorer that stands still until it is opened, and remembers the ground truths of each call."""

    def __init__(self):
        self.open, self.calls = threading.Event(), []

    def __call__(self, images, ground_truths, prompts, extra_infos):
        self.calls.append(list(ground_truths))
        assert self.open.wait(GUARD)
        return mean_scorer(images, ground_truths, prompts, extra_infos)


@contextmanager
def serving(scorers: dict[str, Callable], port: int = 0, **options) -> Iterator[RewardServer]:
    server = RewardServer(port=port)
    server.listen()
    thread = threading.Thread(target=server.run, args=(scorers,), kwargs=options)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(GUARD)
        assert not thread.is_alive()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def file_of(image: Image.Image, kind: str = "PNG", **options) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def until(condition: Callable[[], bool], guard: float = GUARD) -> None:
    end = time.monotonic() + guard
    while not condition():
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.01)


class Command:
    """`verl-omni serve-reward` with a module of scorers, in a process of its own."""

    def __init__(self, folder: Path, module: str, *arguments: str):
        (folder / "my_scorers.py").write_text(module)
        paths = [str(folder), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "verl_omni.cli.main", "serve-reward", "--external-lib", "my_scorers", *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.said, self.address = "", None
        for line in self.process.stderr:
            self.said += line
            if line.startswith("serving"):
                self.address = line.split()[-1]
                return

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def end(self) -> int:
        """Its exit code; what it said last is in `said`."""
        self.said += self.process.communicate(timeout=GUARD)[1]
        return self.process.returncode


@contextmanager
def answering(answer: Callable[[dict], tuple[int, dict[str, str], bytes]], port: int = 0) -> Iterator[str]:
    """The address of a plain HTTP server that answers the JSON of each POST as `answer` says."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, headers, content = answer({"path": self.path, "headers": dict(self.headers), "body": body})
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
