"""A Ray that dies while it starts is started again, one that dies later ends the run at once: both with the cause."""

import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from ray._private import node, parameter, services

from verl_omni.trainer import own_ray
from verl_omni.trainer.own_ray import Daemons, RayDied, cause, start_own_ray
from verl_omni.utils.errors import RunError

# As a raylet writes it: Ray's address of the bug, the failed check, the reason; then a stack.
LOG = (
    "[2026-11-17 23:09:45,942 C 24752 24752] (raylet) node_manager.cc:3576:  An unexpected system state has occurred. "
    "Check failed: statussetor3576.has_value() Timed out waiting for file {session}/metrics_agent_port_cb5\n"
    "*** StackTrace Information ***\n/site-packages/ray/core/src/ray/raylet/raylet(+0x61fe4c) [0xaaaad036fe4c]\n"
)


@pytest.fixture
def started(monkeypatch, tmp_path):
    """What stands for Ray: each start is a raylet that ends with the next exit code (None: it goes on)."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/raylet.err").write_text(LOG.format(session=tmp_path))
    seen = SimpleNamespace(codes=[], commands=[], parameters=[], processes=[])

    def start_process(command, process_type, **kwargs):
        code = seen.codes.pop(0)
        process = subprocess.Popen(["sleep", "600"] if code is None else ["sh", "-c", f"exit {code}"])
        seen.commands.append(command)
        seen.processes.append(process)
        return SimpleNamespace(process=process)

    def get_node(*args):
        if seen.processes[-1].poll() is None and not seen.codes:
            return {"node": 1}
        raise RuntimeError("no node yet")

    def init(arguments):
        seen.parameters.append((parameter.RayParams, arguments, dict(os.environ)))
        services.start_ray_process([f"--log_dir={tmp_path}/logs"], process_type="raylet", fate_share=False)
        services.get_node("address", "id")

    monkeypatch.setattr(services, "start_ray_process", start_process)
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(own_ray, "_init", init)
    yield seen
    for process in seen.processes:
        process.kill()
        process.wait()


def test_a_raylet_that_gave_up_is_started_again_with_other_ports(started, capsys):
    started.codes = [1, None]
    start_own_ray({"num_cpus": 2})
    (line,) = capsys.readouterr().out.splitlines()
    pid = started.processes[0].pid
    assert line.startswith(
        f"Ray did not start: Ray's raylet (pid {pid}) ended with exit code 1: Timed out waiting for file "
        "metrics_agent_port_cb5 ("
    )
    chosen = []
    for (made, arguments, limits), command in zip(started.parameters, started.commands, strict=True):
        ports = made.keywords
        assert ports.pop("no_monitor")
        assert ports.keys() == {"metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port"}
        assert arguments.keys() == {"num_cpus", "_metrics_export_port"}
        chosen.append({*ports.values(), arguments["_metrics_export_port"]})
        assert len(chosen[-1]) == 4
        assert f"--dashboard_agent_listen_port={ports['dashboard_agent_listen_port']}" in command
        assert own_ray.LIMITS.items() <= limits.items()
    assert chosen[0] != chosen[1]


def test_a_server_that_dies_while_ray_waits_for_it_is_the_reason(started, monkeypatch, capsys):
    """Ray itself has a line of its own for that, of a client that has no connection."""

    def init(arguments):
        services.start_ray_process(["gcs_server"], process_type="gcs_server", fate_share=False)
        if not started.codes:
            return
        started.processes[-1].wait()
        raise RuntimeError("Failed to start GCS.  Last 0 lines of error files:\n\n. Last connection error: None")

    monkeypatch.setattr(own_ray, "_init", init)
    started.codes = [1, None]
    start_own_ray({})
    pid = started.processes[0].pid
    said = f"Ray did not start: Ray's gcs_server (pid {pid}) ended with exit code 1. Starting it again\n"
    assert capsys.readouterr().out == said


def test_it_is_not_started_for_ever(started):
    started.codes = [1] * own_ray.STARTS + [None]
    with pytest.raises(RunError, match=r"^Ray did not start in 3 attempts: Ray's raylet .* Timed out waiting for file"):
        start_own_ray({})
    assert started.codes == [None]


def test_nothing_of_it_stays(started):
    exchanged = [(services, "start_ray_process"), (services, "get_node"), (services, "start_api_server")]
    exchanged += [(node, "wait_for_persisted_port"), (parameter, "RayParams")]
    before = [getattr(*one) for one in exchanged]
    started.codes = [1, None]
    start_own_ray({})
    assert before == [getattr(*one) for one in exchanged]
    assert not own_ray.LIMITS.keys() & os.environ.keys()
    assert started.processes[0].returncode == 1 and started.processes[1].poll() is None


def test_one_that_lives_and_does_not_answer(started, monkeypatch):
    monkeypatch.setattr(own_ray, "SECONDS", 0.0)
    started.codes = [None, None]
    with pytest.raises(RunError, match="^Ray did not start within 0 s: no node yet$"):
        start_own_ray({})


def test_the_names_that_it_exchanges_are_those_of_ray():
    """Ray looks these up when it starts; another version may not."""
    with open(services.__file__) as file:
        source = file.read()
    assert "process_info = start_ray_process(" in source and '"--metrics-agent-port={metrics_agent_port}"' in source
    with open(node.__file__) as file:
        source = file.read()
    assert "ray._private.services.get_node(" in source and "= wait_for_persisted_port(" in source
    assert "self._webui_url, process_info = ray._private.services.start_api_server(" in source


def test_no_process_that_counts_how_ray_is_used(started, monkeypatch):
    """Ray starts one even without a dashboard, and waits for it: two thirds of its start."""
    asked = []
    monkeypatch.setattr(services, "start_api_server", lambda *given: asked.append(given))
    monkeypatch.setattr(own_ray, "_init", lambda arguments: asked.append(services.start_api_server(False, port=None)))
    start_own_ray({})
    assert asked == [(None, None)]


@pytest.mark.parametrize("log", ["", "[2026-11-17 23:09:45,942 I 1 1] (raylet) main.cc:1: All is well\n"])
def test_without_a_cause_in_the_log(tmp_path, log):
    (tmp_path / "raylet.out").write_text(log)
    assert cause("raylet", [f"--log_dir={tmp_path}"]) == cause("raylet", ["--node=1"]) == ""


def test_two_runs_take_no_port_of_each_other(monkeypatch):
    """Also where both look at a time at which neither listens yet."""
    monkeypatch.setattr(own_ray, "ROWS", 2)
    one, other = Daemons(), Daemons()
    first, second = one.claim_ports(4), other.claim_ports(4)
    assert len({*first, *second}) == 8
    with socket.socket() as agent:
        agent.bind(("", first[0]))  # what is claimed is not taken
    one.end()
    third = Daemons()
    assert third.claim_ports(4) == first
    third.end()
    other.end()


def test_a_row_in_which_somebody_listens_is_left_out(monkeypatch):
    monkeypatch.setattr(own_ray, "ROWS", 2)
    daemons, rows = Daemons(), [own_ray.FIRST_PORT, own_ray.FIRST_PORT + own_ray.ROW]
    with socket.socket() as stranger:
        stranger.bind(("", rows[0] + 3))
        assert daemons.claim_ports(4)[0] == rows[1] + 1
    daemons.end()


def test_the_main_thread_is_told_wherever_it_waits():
    daemons, gcs = Daemons(), subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    daemons.add("gcs_server", gcs, [])
    with pytest.raises(RayDied, match=rf"^Ray's gcs_server \(pid {gcs.pid}\) was killed by SIGKILL during the \w+"):
        with daemons.watched():
            gcs.kill()
            threading.Event().wait(60)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_an_end_that_is_wanted_is_no_death():
    daemons, gcs = Daemons(), subprocess.Popen(["sleep", "600"])
    daemons.add("gcs_server", gcs, [])
    with daemons.watched():
        pass
    daemons.end()
    assert gcs.returncode == -signal.SIGKILL
