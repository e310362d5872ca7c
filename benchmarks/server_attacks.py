"""What do hostile requests do to `verl-omni serve-reward`: to its memory, and to a good client beside them?

    python -m benchmarks.server_attacks [--only bombs lists ...]

Starts the command anew for each attack, on this machine and for this machine only, attacks it for some seconds, and
meanwhile asks it for the score of a small image, over and over, each time on a new connection. Prints a table: the most
memory that the server ever had and what it has at the end, the longest that the good client waited for a score, how
many hostile connections were still open at the end, and how much the server wrote to its log.

Hostile connections come from other addresses of this machine (127.0.0.2 and on); `same address` from the good client's.
"""

import argparse
import base64
import http.client
import io
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

TOKEN, PATH = "sesame", "/v1/score/jpeg_compressibility"
WATCHED_SECONDS = 25  # for each attack
MOST_SECONDS = 120  # that the good client may wait in all
PAUSE = 0.2  # of the good client, between two requests and before it tries again
HANDS = 1500  # connections of an attack on connections


def body_of(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return json.dumps({"samples": [{"image": base64.b64encode(file.getvalue()).decode()}]}).encode()


class Server:
    """The command in a process of its own, with `handles` open files at most."""

    def __init__(self, handles: int):
        self.log = tempfile.NamedTemporaryFile(suffix=".log")
        command = [sys.executable, "-m", "verl_omni.cli.main", "serve-reward", "jpeg_compressibility", "--port", "0"]
        self.process = subprocess.Popen(
            [*command, "--token-env", "ATTACKED_TOKEN"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(["", *sys.path]), "ATTACKED_TOKEN": TOKEN},
            stderr=self.log,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (handles, handles)),
        )
        while not (found := re.search(r"^serving .*:(\d+)$", Path(self.log.name).read_text(), re.MULTILINE)):
            if self.process.poll() is not None:
                sys.exit(f"error: the server did not start: {Path(self.log.name).read_text()}")
            time.sleep(0.1)
        self.port = int(found[1])

    def megabytes(self, what: str) -> float:
        """VmHWM: the most that there ever was; VmRSS: what there is."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"^{what}:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024 / 1e6

    def log_bytes(self) -> int:
        return Path(self.log.name).stat().st_size

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


@dataclass
class Good:
    """A client that wants one score after the other."""

    port: int
    longest: float = 0.0
    scores: int = 0
    refused: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    body: bytes = body_of(Image.new("RGB", (64, 64), (200, 30, 30)))

    def run(self) -> None:
        give_up = time.monotonic() + MOST_SECONDS
        while not self.stop.is_set():
            began = time.monotonic()
            while not self.asked() and time.monotonic() < give_up:
                self.refused += 1
                time.sleep(PAUSE)
            self.longest = max(self.longest, time.monotonic() - began)
            self.scores += 1
            self.stop.wait(PAUSE)

    def asked(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=MOST_SECONDS)
        try:
            connection.request("POST", PATH, self.body, {"Authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            answer.read()
            return answer.status == 200
        except OSError:
            return False
        except http.client.HTTPException:
            return False
        finally:
            connection.close()


class Attack:
    """Hostile connections, which are kept until the end."""

    def __init__(self, port: int):
        self.port, self.sockets, self.over = port, [], False

    def send(self, *parts: bytes, address: str = "127.0.0.2") -> None:
        if self.over:
            return
        try:
            hostile = socket.create_connection(("127.0.0.1", self.port), timeout=5, source_address=(address, 0))
            self.sockets.append(hostile)
            hostile.settimeout(MOST_SECONDS)
            for part in parts:
                hostile.sendall(part)
        except OSError:  # it was refused, or cut off while it sent
            pass

    def still_open(self) -> int:
        """Of the connections, those that the server has not closed."""
        count = 0
        for hostile in self.sockets:
            hostile.settimeout(0)
            try:
                while hostile.recv(2**16):
                    pass
            except BlockingIOError:
                count += 1
            except OSError:
                pass
        return count

    # ---- the attacks ---------------------------------------------------------------------------------

    def bombs(self) -> None:
        """24 requests with a black image of 8190 x 8190 pixels, 260 kB each"""
        body = body_of(Image.new("RGB", (8190, 8190)))
        for _ in range(24):
            self.send(request(len(body)), body)

    def videos(self) -> None:
        """24 requests with 60 frames of a black image of 1024 x 1024 pixels"""
        frame = json.loads(body_of(Image.new("RGB", (1024, 1024))))["samples"][0]["image"]
        body = json.dumps({"samples": [{"frames": [frame] * 60}]}).encode()
        for _ in range(24):
            self.send(request(len(body)), body)

    def lists(self) -> None:
        """one request of 120 MB of empty lists"""
        lists = b"[]," * 40_000_000
        self.send(request(len(lists) + 20), b'{"samples": [', lists, b"[]     ]}")

    def headers(self) -> None:
        """1,500 connections whose headers never end, without a token"""
        for _ in range(HANDS):
            self.send(b"POST / HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n")

    def headers_same_address(self) -> None:
        """the same, from the good client's own address"""
        for _ in range(HANDS):
            self.send(b"POST / HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n", address="127.0.0.1")

    def few_handles(self) -> None:
        """the same from 30 addresses, and the server has 256 file handles"""
        for number in range(HANDS):
            self.send(b"POST / HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n", address=f"127.0.0.{2 + number % 30}")

    def bodies(self) -> None:
        """300 bodies that never end, with the token"""
        for _ in range(300):
            self.send(request(1000), b'{"samples')

    def bodies_without_token(self) -> None:
        """1,500 bodies that never end, without the token"""
        for _ in range(HANDS):
            self.send(request(1000, b"wrong"), b'{"samples')

    def large_bodies(self) -> None:
        """64 bodies of 100 MB that never end, with the token"""
        part = b" " * 2**20
        for _ in range(64):
            self.send(request(100 * 2**20), *[part] * 99)


def request(length: int, token: bytes = TOKEN.encode()) -> bytes:
    return (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n".encode()
        + b"Authorization: Bearer %s\r\n\r\n" % token
    )


ATTACKS: dict[str, Callable[[Attack], None]] = {
    name: attack for name, attack in vars(Attack).items() if attack.__doc__ and name not in ("still_open",)
    and callable(attack)
}  # fmt: skip


def measure(name: str) -> str:
    server = Server(256 if name == "few_handles" else 4096)
    try:
        before = server.megabytes("VmRSS")
        good, attack = Good(server.port), Attack(server.port)
        asking = threading.Thread(target=good.run)
        asking.start()
        time.sleep(1)
        began = time.monotonic()
        attacking = threading.Thread(target=ATTACKS[name], args=(attack,), daemon=True)
        attacking.start()
        time.sleep(max(0, WATCHED_SECONDS - (time.monotonic() - began)))
        good.stop.set()
        asking.join()
        attack.over = True
        left = attack.still_open()
        for hostile in attack.sockets:
            hostile.close()
        attacking.join()
        most = server.megabytes("VmHWM")
        time.sleep(3)
        return (
            f"| {ATTACKS[name].__doc__} | {before:.0f} | {most:.0f} | {server.megabytes('VmRSS'):.0f} | "
            f"{good.longest:.1f} | {good.scores} | {left} | {server.log_bytes() / 1e3:.1f} |"
        )
    finally:
        server.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS))
    names = parser.parse_args().only
    print("| attack | MB before | most MB | MB after | longest wait, s | scores | left open | log, kB |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        print(measure(name), flush=True)


if __name__ == "__main__":
    main()
