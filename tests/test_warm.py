"""Forks of tests are what started processes would be: see warm.py. e2e/ has whole runs of them."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import warm

pytestmark = pytest.mark.skipif(not warm.WORKS, reason="processes are forked on Linux only")

TELL = """
import json, os, random, sys, numpy, torch
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "name": __name__,
    "variables": {k: os.environ.get(k) for k in ("PYTHONPATH", "OMP_NUM_THREADS", "KEEP_METRICS", "WARM_ROOM")},
    "threads": torch.get_num_threads(), "loaded": "verl" in sys.modules,
    "numbers": [random.random(), numpy.random.rand(), torch.rand(1).item(), os.getpid()],
}))
sys.exit(3)
"""


@pytest.fixture
def telling(tmp_path):
    (tmp_path / "tell.py").write_text(TELL)
    return tmp_path, os.environ | {"PYTHONPATH": f"{tmp_path}/mine", "KEEP_METRICS": "here"}


def test_a_fork_is_what_a_started_process_is(telling):
    folder, environment = telling
    told = []
    for python in ([sys.executable], warm.python(), warm.python()):
        done = subprocess.run([*python, "tell.py", "a b"], cwd=folder, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (3, "")
        told.append(json.loads(done.stdout))
    numbers = [one.pop("numbers") for one in told]
    assert len({str(number) for one in numbers for number in one}) == 12, "what is random is not shared"
    assert [one.pop("loaded") for one in told] == [False, True, True]
    # Ray puts a folder of its own there when it is imported.
    paths = [[path for path in one.pop("path") if "thirdparty_files" not in path] for one in told]
    assert paths[0] == paths[1] == paths[2] and told[0] == told[1] == told[2]


def test_its_environment_is_seen_from_outside(telling):
    folder, environment = telling
    (folder / "wait.py").write_text("import time\nprint('up', flush=True)\ntime.sleep(600)\n")
    with (folder / "log").open("w") as log:
        fork = warm.Fork(["wait.py"], folder, environment, log)
    while not (folder / "log").read_text():
        time.sleep(0.01)
    seen = open(f"/proc/{fork.pid}/environ").read().rstrip("\0").split("\0")
    assert dict(one.split("=", 1) for one in seen) == environment
    assert fork.poll() is None
    fork.kill()
    assert fork.wait(60) == -signal.SIGKILL


def test_who_asked_for_it_takes_it_along(telling):
    folder, environment = telling
    (folder / "wait.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    asker = subprocess.Popen(
        [*warm.python(), "wait.py"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    pid = int(asker.stdout.readline())
    asker.kill()
    end = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{pid}")
    asker.wait()


def test_with_a_variable_that_a_library_may_have_read_it_is_started(telling):
    folder, environment = telling
    for python in (warm.python(), warm.python()):
        done = subprocess.run(
            [*python, "tell.py"], cwd=folder, env=environment | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (3, "")
        told = json.loads(done.stdout)
        assert told["variables"]["OMP_NUM_THREADS"] == "2" and told["threads"] == 2 and not told["loaded"]
        assert told["variables"]["WARM_ROOM"] is None
