"""Workers that are forks of a process which has imported the libraries: what a started Python would be.

Whole runs of them are in tests/e2e/test_interrupts.py and test_two_processes.py, whose commands are started.
"""

import gc
import json
import os
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_omni.cli import supervisor, train
from verl_omni.trainer import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")

# A driver that asks for one process after another, as Ray does, and for plain Python's in between.
DRIVER = """
import json, os, psutil, resource, shlex, signal, subprocess, sys, threading
from verl_omni.trainer import ask_for_fork, forked

for module, name in ((os, "pidfd_open"), (os, "P_PIDFD"), (signal, "pidfd_send_signal")):
    vars(module).pop(name, None)  # as in conda's Python, which is compiled with old headers
forked.LIBRARIES, forked.FOR_WORKERS = ("torch",), ("broken", "PIL.Image")
forked.import_libraries()
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (300, most))
forked.prepare()
resource.setrlimit(resource.RLIMIT_NOFILE, (400, most))  # as ray.init does
asks = shlex.split(forked.command())
told = {}
for name, (python, more) in json.loads(sys.argv[1]).items():
    command = [*(asks if python == "fork" else [sys.executable]), "-u", "tell.py", "a b"]
    environment = {**os.environ, "PYTHONPATH": "mine", "RAY_SOMETHING": "1", **more}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="elsewhere")
    told[name] = [json.loads(done.stdout or "null"), done.stderr]

def wait():
    asker = subprocess.Popen([*asks, "wait.py"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    return asker, *map(int, asker.stdout.readline().split())

asker, waiting, server = wait()
watch = psutil.Process(waiting)
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.killpg(0, signal.SIGINT)
os.killpg(0, signal.SIGTERM)
os.kill(server, signal.SIGTERM)
other, another, same_server = wait()
told["left by a Ctrl-C"] = server == same_server != os.getpid() and watch.is_running()
asker.kill()
told["ended with who asked"] = psutil.wait_procs([watch], 60)[0] == [watch]
os.kill(another, signal.SIGKILL)
told["who asked has ended"] = other.wait(60)

def lines(*command, **more):
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=60)
    return done.stdout, done.stderr

told["killed first"] = lines("sh", "-c", f"echo 777 > /proc/self/oom_score_adj; exec {shlex.join(asks)} look.py")
told["by a shell"] = lines("bash", "-c", f"exec {shlex.join(asks)} look.py")
told["signals of a fork"] = lines(*asks, "signals.py")
told["without the key"] = lines(*asks, "look.py", **{ask_for_fork.KEY: "0" * ask_for_fork.KEY_SIZE})
told["no key at all"] = lines(*asks, "look.py", **{ask_for_fork.KEY: ""})
told["no file"] = lines(*asks, "missing.py")
key = os.environ[ask_for_fork.KEY]
told["in sight"] = key in forked.command() or key in open("/proc/net/unix").read()
threading.Thread(target=threading.Event().wait, daemon=True).start()
forked._name = None
forked.prepare()
told["with threads"] = forked.command()
print(json.dumps(told))
"""
TELL = """
import sys
loaded = "torch" in sys.modules
import json, logging, os, random, resource, numpy, torch
print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "name": __name__, "file": __file__, "own": sys.path[:2],
    "variables": {k: os.environ.get(k) for k in ("PYTHONPATH", "OMP_NUM_THREADS", "RAY_SOMETHING", "HF_HOME")},
    "threads": torch.get_num_threads(), "handlers": len(logging.root.handlers),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "computed": torch.ones(300, 300).mm(torch.ones(300, 300)).sum().item(),
    "loaded": loaded, "numbers": [random.random(), numpy.random.rand(), torch.rand(1).item(), os.getpid()],
}))
"""
WAIT = "import os, time\nprint(os.getpid(), os.getppid(), flush=True)\ntime.sleep(600)\n"
ONE, HOME = {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1", "HF_HOME": "/elsewhere"}

# Whether it is a fork, what the kernel is told of it, and whether it knows the key.
LOOK = """
import os, sys
print("torch" in sys.modules, open("/proc/self/oom_score_adj").read().strip(), "VERL_OMNI_FORK_KEY" in os.environ)
"""
SIGNALS = """
import signal, sys
names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD")
print("torch" in sys.modules, *(signal.getsignal(getattr(signal, name)) for name in names))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("forked")
    (folder / "elsewhere").mkdir()
    for place in (folder / "elsewhere", folder):
        (place / "tell.py").write_text(TELL)
    for name, text in {"wait.py": WAIT, "look.py": LOOK, "signals.py": SIGNALS}.items():
        (folder / name).write_text(text)
    (folder / "broken.py").write_text("raise RuntimeError('as a library beside another that is too new for it')\n")
    (folder / "driver.py").write_text(DRIVER)
    asked = {"started": ("python", ONE), "fork": ("fork", ONE), "another": ("fork", ONE), "home": ("fork", HOME)}
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PS1": "(.venv) $ "}
    done = subprocess.run(
        [sys.executable, "driver.py", json.dumps(asked)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,  # it sends signals to all of it
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
    assert not found["loaded"] and found["variables"]["HF_HOME"] == "/elsewhere"
    assert errors == "no fork of the libraries, Python is started: Differs('HF_HOME: another value than on import')\n"


def test_a_shell_that_drops_its_prompt_between_them_changes_nothing(told):
    """As Ray's does, which starts workers by `bash -c`, of the prompt that `source .venv/bin/activate` exports."""
    assert told["by a shell"][0].startswith("True ") and told["by a shell"][1] == ""


def test_a_fork_and_who_asked_for_it_end_together(told):
    assert told["ended with who asked"] and told["who asked has ended"] == 0


def test_a_ctrl_c_is_for_the_driver(told):
    assert told["left by a Ctrl-C"]


def test_signals_do_to_a_fork_what_they_do_to_a_started_process(told, tmp_path):
    (tmp_path / "signals.py").write_text(SIGNALS)
    started = subprocess.check_output([sys.executable, "signals.py"], cwd=tmp_path, text=True).split(maxsplit=1)
    found = told["signals of a fork"][0].split(maxsplit=1)
    assert (started[0], found[0]) == ("False", "True")
    assert without_addresses(found[1]) == without_addresses(started[1])


def without_addresses(line: str) -> str:
    return re.sub("0x[0-9a-f]+", "", line)


def test_the_kernel_takes_a_fork_as_early_as_who_asked(told):
    assert told["killed first"] == ["True 777 False\n", ""]


def test_who_does_not_know_the_key_gets_no_fork_but_python(told):
    for case in ("without the key", "no key at all"):
        lines, errors = told[case]
        assert lines.startswith("False ") and lines.endswith(" False\n") and errors == ""
    assert not told["in sight"]


def test_python_is_started_where_a_fork_cannot_become_it(told):
    lines, errors = told["no file"]
    fork, python = errors.splitlines()
    assert lines == "" and fork.startswith("no fork of the libraries, Python is started: FileNotFoundError")
    assert python.startswith(sys.executable) and "can't open file" in python


@pytest.mark.parametrize("start, forks", [(train.command, True), (train.main, False)])
def test_workers_of_a_launcher_which_may_have_imported_anything_are_started(monkeypatch, start, forks):
    prepared = []
    monkeypatch.setattr(sys, "argv", ["verl-omni", "--cfg=job"])
    monkeypatch.setattr(train, "_forks", False)
    monkeypatch.setattr(supervisor, "watch", lambda: None)
    monkeypatch.setattr(forked, "import_libraries", lambda: None)
    monkeypatch.setattr(forked, "prepare", lambda: prepared.append(True))
    monkeypatch.setitem(sys.modules, "verl_omni.trainer.checks.preflight", None)  # all is decided before its import
    config = OmegaConf.create({"ray": {"address": None}, "actor_rollout_ref": {"rollout": {"name": "diffusers"}}})
    monkeypatch.setattr(train, "with_configuration", lambda task: train.import_checks(config))
    with pytest.raises(ImportError):
        start()
    assert bool(prepared) is forks


def test_what_an_earlier_run_left_is_not_put_aside_with_the_libraries(monkeypatch):
    """A launcher may call the command several times: a run's models would be kept to the end of the process."""

    class Left:
        pass

    monkeypatch.setattr(forked, "import_libraries", lambda: None)
    gc.disable()  # nobody comes before it
    left = Left()
    left.itself, known = left, weakref.ref(left)
    del left
    try:
        train.import_checks(OmegaConf.create({"ray": {"address": None}}))
        gc.collect()
        assert known() is None
    finally:
        gc.unfreeze()
        gc.enable()


def test_no_fork_of_a_process_with_threads(told):
    assert told["with threads"] is None


def test_where_nobody_is_asked_python_is_started(tmp_path):
    (tmp_path / "tell.py").write_text("import sys\nprint(sys.argv[1:])\n")
    asks = Path(__file__).parents[2] / "verl_omni/trainer/ask_for_fork.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", asks, "nobody", "-u", "tell.py", "a"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("['a']\n", "")
