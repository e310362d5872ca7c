"""The server of a judge that a run starts: it answers, it comes back, and it says why it cannot."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable

import psutil
import pytest

from verl_omni.rewards.choice import read_choices
from verl_omni.rewards.judge import JudgeServer, with_judge
from verl_omni.utils.errors import RunError

SERVER = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = json.dumps({"pid": os.getpid(), "model": sys.argv[1], "gpus": sys.argv[3]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("", int(sys.argv[2])), Handler).serve_forever()
"""

WITH_ENGINE = """
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open("{engine}", "a") as file:
    print(engine.pid, file=file)
"""


@pytest.fixture
def judge(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)
    made = JudgeServer(f"{sys.executable} {tmp_path}/server.py {{model}} {{port}} {{gpus}}", "/m", 0, f"{tmp_path}/log")
    yield made
    if made.process is not None:
        made.stop()


def ask(address: str) -> dict:
    with urllib.request.urlopen(address.removesuffix("/v1") + "/health", timeout=10) as answer:
        return json.load(answer)


def test_it_answers_and_comes_back_on_the_same_address(judge):
    address = judge.start(30)
    first = ask(address)
    assert first["model"] == "/m" and first["gpus"] == "1" and first["pid"] == judge.pid()
    os.kill(first["pid"], signal.SIGKILL)
    end = time.monotonic() + 30
    while True:
        try:
            again = ask(address)
            break
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert again["pid"] != first["pid"] and judge.restarts == 1
    judge.stop()
    assert not psutil.pid_exists(again["pid"]) and judge.restarts == 1


def test_nothing_of_this_process_runs_in_a_fork_of_it(judge, tmp_path, monkeypatch):
    """Handlers of its libraries for forks do: one of them crashed there, and no server came back."""
    monkeypatch.setattr(FORKED, "here", tmp_path / "forked")
    judge.start(30)
    assert not FORKED.here.exists()


class FORKED:
    here = None


os.register_at_fork(after_in_child=lambda: FORKED.here and FORKED.here.touch())


def test_what_a_killed_server_had_started_is_ended_with_it(tmp_path):
    """vLLM's engine is a process of its own: it would keep the GPU's memory from the server that is started again."""
    engine = tmp_path / "engine"
    (tmp_path / "server.py").write_text(WITH_ENGINE.format(engine=engine) + SERVER)
    judge = JudgeServer(f"{sys.executable} {tmp_path}/server.py m {{port}} 0", "/m", 0, f"{tmp_path}/log")
    try:
        ask(judge.start(30))
        (first,) = map(int, engine.read_text().split())
        os.kill(judge.pid(), signal.SIGKILL)
        until(lambda: len(engine.read_text().split()) == 2 and not runs(first))
    finally:
        judge.stop()
    until(lambda: not any(runs(int(pid)) for pid in engine.read_text().split()))


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """A process that has ended may stay a while under its number, until somebody asks how."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "no_such_server {model}",
            "cannot be started: No such file or directory: no_such_server. Install it",
        ),
        (
            f"{sys.executable} -c 'raise SystemExit(\"no weights in {{model}}\")'",
            "ended with 1: no weights in /m (al",
        ),
        (f"{sys.executable} -c 'import time; print(1, flush=True); time.sleep(60)'", "start_timeout=2 s: 1 (all of it"),
    ],
)
def test_one_that_does_not_start_says_why(tmp_path, command, said):
    with pytest.raises(RunError) as error:
        JudgeServer(command, "/m", 0, f"{tmp_path}/log").start(2)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("restarted", [False, True])
def test_it_does_not_outlive_who_started_it(tmp_path, restarted):
    """Nor does what it has started: vLLM's engine stays where its server is killed."""
    engine = tmp_path / "engine"
    (tmp_path / "server.py").write_text(WITH_ENGINE.format(engine=engine) + SERVER)
    code = (
        "import os, signal, time\nfrom verl_omni.rewards.judge import JudgeServer\n"
        f"judge = JudgeServer('{sys.executable} {tmp_path}/server.py m {{port}} 1', 'm', 0, '{tmp_path}/log')\n"
        "judge.start(60)\nfirst = judge.pid()\n"
        f"if {restarted}:\n    os.kill(first, signal.SIGKILL)\n"
        f"while len(open('{engine}').read().split()) < {1 + restarted}:\n    time.sleep(0.05)\n"
        "print(judge.pid(), flush=True)\nos.kill(judge.pid(), signal.SIGKILL)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()[-1])
    until(lambda: not any(map(runs, [pid, *map(int, engine.read_text().split())])))


def test_only_a_judge_without_a_server_of_its_own_is_sent_there():
    other = {"name": "vlm_judge", "label": "other", "address": "http://a/v1", "model": "b"}
    choices = read_choices([{"name": "vlm_judge", "template": "qwen_vl"}, {"name": "ocr"}, other])
    filled = with_judge(choices, "http://here/v1", "/m")
    assert filled["vlm_judge"].settings == {"address": "http://here/v1", "model": "/m", "template": "qwen_vl"}
    assert filled["ocr"] == choices["ocr"] and filled["other"] == choices["other"]
