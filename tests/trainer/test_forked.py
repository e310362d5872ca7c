"""Workers that are forks of a process which has imported the libraries: what a started Python would be.

Whole runs of them are in tests/e2e/test_interrupts.py and test_two_processes.py, whose commands are started.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

# A driver that asks for one process after another, as Ray does, and for plain Python's in between.
DRIVER = """
import json, os, shlex, signal, subprocess, sys, threading
from verl_omni.trainer import forked

forked.LIBRARIES, forked.FOR_MODELS = ("torch",), ("PIL.Image",)
forked.import_libraries()
forked.prepare()
asks = shlex.split(forked.command())
told = {}
for name, (python, more) in json.loads(sys.argv[1]).items():
    command = [*(asks if python == "fork" else [sys.executable]), "-u", "tell.py", "a b"]
    environment = {**os.environ, "PYTHONPATH": "mine", "RAY_SOMETHING": "1", **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="elsewhere")
    told[name] = [json.loads(done.stdout or "null"), done.stderr]

asker = subprocess.Popen([*asks, "wait.py"], stdout=subprocess.PIPE, text=True)
waiting = int(asker.stdout.readline())
watch = os.pidfd_open(waiting)
asker.kill()
told["ended with who asked"] = bool(__import__("select").select([watch], [], [], 60)[0])
asker = subprocess.Popen([*asks, "wait.py"], stdout=subprocess.PIPE, text=True)
os.kill(int(asker.stdout.readline()), signal.SIGKILL)
told["who asked has ended"] = asker.wait(60)
threading.Thread(target=threading.Event().wait, daemon=True).start()
forked._name = None
forked.prepare()
told["with threads"] = forked.command()
print(json.dumps(told))
"""
TELL = """
import sys
loaded = "torch" in sys.modules
import json, logging, os, random, numpy, torch
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "name": __name__, "file": __file__, "own": sys.path[:2],
    "variables": {k: os.environ.get(k) for k in ("PYTHONPATH", "OMP_NUM_THREADS", "RAY_SOMETHING", "HF_HOME")},
    "threads": torch.get_num_threads(), "handlers": len(logging.root.handlers),
    "computed": torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item(),
    "loaded": loaded, "numbers": [random.random(), numpy.random.rand(), torch.rand(1).item(), os.getpid()],
}))
"""
WAIT = "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
ONE, HOME = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "HF_HOME": "/elsewhere"}


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("forked")
    (folder / "elsewhere").mkdir()
    for place in (folder / "elsewhere", folder):
        (place / "tell.py").write_text(TELL)
        (place / "wait.py").write_text(WAIT)
    (folder / "driver.py").write_text(DRIVER)
    asked = {"started": ("python", ONE), "fork": ("fork", ONE), "another": ("fork", ONE), "home": ("fork", HOME)}
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "driver.py", json.dumps(asked)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_fork_is_what_a_started_process_is(told):
    found = [told[name][0] for name in ("started", "fork", "another")]
    assert [told[name][1] for name in ("started", "fork", "another")] == ["", "", ""]
    assert [one.pop("loaded") for one in found] == [False, True, True]
    numbers = [one.pop("numbers") for one in found]
    assert len({str(number) for one in numbers for number in one}) == 12, "what is random is not shared"
    assert found[0] == found[1] == found[2] and found[0]["threads"] == 1


def test_python_is_started_where_a_library_may_have_read_a_variable(told):
    found, errors = told["home"]
    assert not found["loaded"] and found["variables"]["HF_HOME"] == "/elsewhere" and errors == ""


def test_a_fork_and_who_asked_for_it_end_together(told):
    assert told["ended with who asked"] and told["who asked has ended"] == 0


def test_no_fork_of_a_process_with_threads(told):
    assert told["with threads"] is None


def test_where_nobody_is_asked_python_is_started(tmp_path):
    (tmp_path / "tell.py").write_text("import sys\nprint(sys.argv[1:])\n")
    asks = Path(__file__).parents[2] / "verl_omni/trainer/ask_for_fork.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", asks, "nobody", "-u", "tell.py", "a"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("['a']\n", "")
