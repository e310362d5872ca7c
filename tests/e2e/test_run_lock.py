"""Two runs in one folder: the second says who has it."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from verl_omni.trainer.run_lock import run_lock

HOLD = "import sys\nfrom verl_omni.trainer.run_lock import run_lock\nwith run_lock(sys.argv[1]):\n"
HOLD += "    print('held', flush=True)\n    sys.stdin.read()\n"


@pytest.fixture
def other(tmp_path):
    """Another process that holds the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def take(folder):
    with run_lock(folder / "run"):
        owner = json.loads((folder / "run" / "run.lock").read_text())
        assert (owner["host"], owner["pid"]) == (socket.gethostname(), os.getpid())


def test_a_folder_in_use_is_refused_with_its_owner(tmp_path, other):
    with pytest.raises(ValueError) as caught:
        take(tmp_path)
    assert f"in use by a run of process {other.pid} on {socket.gethostname()}, since 20" in str(caught.value)
    other.communicate("")
    assert other.returncode == 0
    take(tmp_path)


def test_a_killed_owner_is_recognised(tmp_path, other, capsys):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert (tmp_path / "run" / "run.lock").exists()
    take(tmp_path)
    assert f"The run of process {other.pid} in {tmp_path / 'run'} has ended without a word" in capsys.readouterr().out


def test_an_owner_on_another_machine_cannot_be_asked(tmp_path):
    lock = tmp_path / "run" / "run.lock"
    lock.parent.mkdir()
    lock.write_text(json.dumps({"host": "elsewhere", "pid": 7, "since": "2026-01-02T03:04:05+00:00"}))
    with pytest.raises(ValueError, match=f"process 7 on elsewhere, since 2026-01-02T03:04:05 UTC.*delete {lock}"):
        take(tmp_path)
    lock.unlink()
    take(tmp_path)


@pytest.mark.parametrize("rest", ["", "{", "[]", '{"host": 1}'])
def test_a_lock_that_was_half_written_is_nobodys(tmp_path, rest):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.lock").write_text(rest)
    take(tmp_path)


def test_nothing_is_left_where_nothing_was_written(tmp_path):
    with pytest.raises(KeyError), run_lock(tmp_path / "a" / "run"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with run_lock(tmp_path / "a" / "run"):
        (tmp_path / "a" / "run" / "metrics.jsonl").write_text("")
    assert [p.name for p in (tmp_path / "a" / "run").iterdir()] == ["metrics.jsonl"]
