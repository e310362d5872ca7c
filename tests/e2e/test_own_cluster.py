"""The Ray that a run starts for itself: on loopback, with a token, whatever other Rays and whatever HOME there are."""

import subprocess
import sys
import time

import psutil
import pytest
from e2e_runs import LIMIT, Run, settings, users_environment

from verl_omni.trainer.resources import check_answers

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

# Holds the run still in its first rewards, when every process of it is up, until the test has looked at it.
WAIT_TO_BE_SEEN = """
import pathlib, time

def compute_score(image):
    here = pathlib.Path(__file__).parent
    (here / "scoring").touch()
    while not (here / "seen").exists():
        time.sleep(0.1)
    return sum(image.convert("L").getdata()) / 1e6
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """(sockets, a stranger is refused, exit code, output) of two ranks without a HOME or the Ray they are told of."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "reward.py").write_text(WAIT_TO_BE_SEEN)
    overrides = ["trainer.n_gpus_per_node=2", "trainer.total_training_steps=1", "trainer.val_before_train=false"]
    run = Run(
        settings("run", "reward.custom_reward_function.path=reward.py", *overrides),
        folder, RAY_ADDRESS="127.0.0.1:9", HOME="/proc/no/home",
    )  # fmt: skip
    end = time.monotonic() + LIMIT
    while not (folder / "scoring").exists():
        assert time.monotonic() < end and run.process.poll() is None, run.output()[-3000:]
        time.sleep(0.2)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    sockets = [(p.name(), c.laddr) for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"]
    stranger = refused_by_ray(next(address.port for name, address in sockets if name == "gcs_server"))
    (folder / "seen").touch()
    return sockets, stranger, run.wait(), run.output()


def refused_by_ray(port: int) -> bool:
    """Somebody else on this machine, who asks Ray without the token."""
    status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", f"127.0.0.1:{port}"]
    keep_to_loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray's tools ask at the machine's address
    environment = users_environment() | {"RAY_AUTH_MODE": "disabled"} | keep_to_loopback
    asked = subprocess.run(status, capture_output=True, text=True, env=environment, timeout=120)
    return asked.returncode != 0 and "InvalidAuthToken" in asked.stderr


def test_nothing_listens_beyond_this_machine(running):
    sockets, *_ = running
    assert {"gcs_server", "raylet"} <= {name for name, _ in sockets}, "the processes of Ray were seen"
    assert [s for s in sockets if not s[1].ip.removeprefix("::ffff:").startswith("127.")] == []


def test_a_stranger_is_refused(running):
    assert running[1]


def test_neither_home_nor_another_ray_is_needed(running):
    _, _, code, output = running
    assert code == 0, output[-5000:]


def test_a_ray_that_is_not_there_is_said_at_once():
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"ray.address=127.0.0.1:9 does not answer \(.*refused\): start Ray there"):
        check_answers("127.0.0.1:9")
    with pytest.raises(ValueError, match=r"ray.address=nonsense does not answer"):
        check_answers("nonsense")
    assert time.monotonic() - began < 30


def test_a_port_that_is_no_ray_is_said_in_time():
    import socket

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ValueError, match=f"ray.address={address} does not answer"):
            check_answers(address, seconds=4)
        assert time.monotonic() - began < 30
