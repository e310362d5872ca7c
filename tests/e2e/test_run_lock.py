"""Two runs in one folder: the second says who has it."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from verl_omni.trainer.run_folder.lock import run_lock

HOLD = "import sys\nfrom verl_omni.trainer.run_folder.lock import run_lock\nwith run_lock(sys.argv[1]):\n"
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


@pytest.mark.parametrize("said", ["No space left on device", "Read-only file system"])
def test_a_disk_that_takes_nothing(tmp_path, monkeypatch, said):
    number = next(n for n in (errno.ENOSPC, errno.EROFS) if os.strerror(n) == said)

    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(ValueError, match=f'trainer.default_local_dir="{tmp_path}/run" cannot be written to: {said}'):
        take(tmp_path)
    monkeypatch.undo()
    take(tmp_path)


@pytest.mark.parametrize("content", ["[" * 4096, "x", "null", '{"host": 1}'])
def test_a_lock_that_says_nothing_is_nobodys(tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.lock").write_text(content)
    take(tmp_path)


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    """/dev/full takes nothing, as a disk without a free byte."""
    (tmp_path / "run.log").symlink_to("/dev/full")
    source = "import sys\nfrom verl_omni.trainer.run_folder.log import log_traceback, open_run_log, terminal\n"
    source += "try:\n    open_run_log(sys.argv[1])\nexcept ValueError as error:\n"
    source += "    log_traceback(error)\n    print(error, file=terminal())\n"
    done = subprocess.run([sys.executable, "-c", source, str(tmp_path)], capture_output=True, text=True)
    assert done.stderr == f"{tmp_path / 'run.log'} cannot be written: No space left on device\n"
