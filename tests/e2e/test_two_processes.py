"""Two processes learn what one does, on a Ray of their own that is closed to others; one validates what they saved."""

import os
import subprocess
import sys

import psutil
import pytest
from e2e_runs import LEARNING, SCORES_OF_VALIDATION, Run, metrics, run_here, settings, user_folder, users_environment

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

VAL = "val-core/jpeg_compressibility/reward/mean@1"
COMPARED = {VAL, "critic/rewards/mean", "critic/advantages/max", "actor/grad_norm", "actor/kl_loss", "actor/lr"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """(folder, sockets, a stranger is refused, exit code, output) of two ranks without a HOME or the Ray they are told
    of, on a machine with a GPU that is hidden from them. The run is held in its first rewards, when every process of it
    is up, until it has been looked at."""
    folder = user_folder(tmp_path_factory.mktemp("two"))
    (folder / "bin").mkdir()
    (folder / "bin/nvidia-smi").write_text("#!/bin/sh\n")
    (folder / "bin/nvidia-smi").chmod(0o755)
    (folder / "hold").write_text(str(SCORES_OF_VALIDATION + 1))
    run = Run(
        settings("run", *LEARNING, "trainer.n_gpus_per_node=2"),
        folder, RAY_ADDRESS="127.0.0.1:9", HOME="/proc/no/home",
        PATH=f"{folder / 'bin'}:{os.environ['PATH']}", CUDA_VISIBLE_DEVICES="", VERL_PLATFORM=None,
    )  # fmt: skip
    run.wait_for(folder / "held")
    processes = psutil.Process(run.process.pid).children(recursive=True)
    sockets = [(p.name(), c.laddr) for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
    stranger = refused_by_ray(next(address.port for name, address in sockets if name == "gcs_server"))
    (folder / "go on").touch()
    return folder, sockets, stranger, run.wait(), run.output()


def refused_by_ray(port: int) -> bool:
    """Somebody else on this machine, who asks Ray without the token."""
    status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", f"127.0.0.1:{port}"]
    keep_to_loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray's tools ask at the machine's address
    environment = users_environment() | {"RAY_AUTH_MODE": "disabled"} | keep_to_loopback
    asked = subprocess.run(status, capture_output=True, text=True, env=environment, timeout=120)
    return asked.returncode != 0 and "InvalidAuthToken" in asked.stderr


def test_nothing_listens_beyond_this_machine(two):
    _, sockets, *_ = two
    assert {"gcs_server", "raylet"} <= {name for name, _ in sockets}, "the processes of Ray were seen"
    assert [s for s in sockets if not s[1].ip.removeprefix("::ffff:").startswith("127.")] == []


def test_a_stranger_is_refused(two):
    _, _, refused, *_ = two
    assert refused


def test_workers_have_not_imported_the_libraries_anew(two):
    """The process that they are forked from has put aside for good what it imported; a started Python has not."""
    folder, *_ = two
    assert int((folder / "held").read_text()) > 100_000


def test_neither_home_nor_another_ray_is_needed_and_a_hidden_gpu_stays_hidden(two):
    *_, code, output = two
    assert code == 0, output[-5000:]


def test_the_number_of_processes_does_not_matter(uninterrupted, two, monkeypatch, capsys):
    folder, *_ = two
    one, other = metrics(uninterrupted), metrics(folder / "run")
    assert list(one) == list(other)
    for step in one:
        assert one[step].keys() == other[step].keys()
        for name in COMPARED & one[step].keys():
            # Rounding moves a pixel by 1 of 255 here and there, and so a reward, and so all that follows.
            close = pytest.approx(one[step][name], rel=1e-3 if step <= 1 else 2e-2, abs=1e-6)
            assert other[step][name] == close, (step, name)

    run_here(settings("run", *LEARNING, "trainer.val_only=true"), folder, monkeypatch)
    assert "Validating run/global_step_3." in capsys.readouterr().out
    again = metrics(folder / "run")
    assert list(again) == [0, 1, 2, 3], "validation adds to the metrics of its checkpoint and takes none away"
    assert again[3][VAL] == pytest.approx(other[3][VAL], abs=1e-4)
