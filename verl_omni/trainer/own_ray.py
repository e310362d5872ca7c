"""A Ray of our own: started again where a busy machine was too slow for its limits, and watched while the run lasts.

Ray's daemons wait for each other with limits of their own, and one that gives up does so in a log file only. Whoever
started them is told by nobody.
"""

import functools
import os
import re
import secrets
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from verl_omni.trainer.progress import progress
from verl_omni.utils.errors import RunError

STARTS = 3
SECONDS = 180.0  # for one start, as long as all of its processes live
# Above Ray's own ports; those of ranks that meet come next (`resources.rendezvous_ports`), then the system's own.
FIRST_PORT, ROW, ROWS = 20_000, 8, 750
WATCHED = ("gcs_server", "raylet")  # without one of these there is no Ray
# Ray's own settings, by default 30 s: for the port of its server, and for the agents of its raylet.
LIMITS = {"RAY_gcs_server_port_wait_time_s": "180", "RAY_agent_register_timeout_ms": "180000"}


class RayDied(RunError):
    """One of Ray's daemons has ended by itself."""


class Daemons:
    """The processes that Ray has started here, and what they leave in their logs."""

    def __init__(self) -> None:
        self._processes: list[tuple[str, subprocess.Popen, list[str]]] = []
        self._claim: socket.socket | None = None

    def claim_ports(self, count: int) -> list[int]:
        """Ports where nobody listens now, in a row that no other run takes before these processes do.

        That is why the one before them is bound until these processes end: they themselves may listen seconds later.
        """
        while True:
            before = FIRST_PORT + ROW * secrets.randbelow(ROWS)
            claim = socket.socket()
            try:
                claim.bind(("", before))
                for port in range(before + 1, before + 1 + count):
                    with socket.socket() as tried:
                        tried.bind(("", port))
            except OSError:
                claim.close()
                continue
            self._claim = claim
            return list(range(before + 1, before + 1 + count))

    def add(self, name: str, process: subprocess.Popen, command: list[str]) -> None:
        self._processes.append((name, process, command))

    def check(self, when: str = "") -> None:
        for name, process, command in self._processes:
            if name in WATCHED and process.poll() is not None:
                how = f"{ended(process.returncode)}{when}{cause(name, command)}"
                raise RayDied(f"Ray's {name} (pid {process.pid}) {how}")

    def end(self) -> None:
        for _, process, _ in self._processes:
            process.kill()
            process.wait()
        if self._claim is not None:
            self._claim.close()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What the main thread does in here is ended by `RayDied` as soon as there is no Ray any more."""
        if threading.current_thread() is not threading.main_thread():
            yield  # nobody else hears signals
            return
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.5):
                try:
                    self.check()
                except RayDied:
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
                    return

        def died(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt  # of all that a handler may raise, Ray's own code lets only this one through

        before = signal.signal(signal.SIGUSR2, died)
        thread = threading.Thread(target=watch, name="watch of Ray", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self.check(f" during the {progress.where()}")  # then that is the reason, whatever came of it
            raise
        finally:
            over.set()
            thread.join()
            signal.signal(signal.SIGUSR2, before)


def start_own_ray(arguments: dict[str, Any]) -> Daemons:
    """`ray.init` of a new Ray on this machine alone. One that dies while it starts is started again."""
    for attempt in range(1, STARTS + 1):
        daemons = Daemons()
        try:
            with _patience(daemons) as ports:
                try:
                    _init(arguments | ports)
                except Exception:
                    daemons.check()  # then that is the reason, whatever Ray says of it
                    raise
            return daemons
        except RayDied as error:
            daemons.end()
            if attempt == STARTS:
                raise RunError(f"Ray did not start in {STARTS} attempts: {error}") from error
            print(f"Ray did not start: {error}. Starting it again", flush=True)
    raise AssertionError("unreachable")


def _init(arguments: dict[str, Any]) -> None:
    import ray
    from ray._private import ray_constants

    # Ray's switch for machines that are no part of a cluster. Its variable is read on import, which is too early.
    with swapped(ray_constants, "ENABLE_RAY_CLUSTER", False):
        # "local": whatever RAY_ADDRESS says, and whatever else runs here.
        ray.init(address="local", **arguments)


@contextmanager
def _patience(daemons: Daemons) -> Iterator[dict[str, Any]]:
    """Waits for Ray's processes as long as they live; yields further arguments for `ray.init`.

    A raylet waits until its agents have said on which port they listen, for 15 s, and no setting changes that. With
    ports that are chosen beforehand it does not ask. If some other program takes one of them meanwhile it dies, as soon
    as its agents have started: the run then ends with that line.
    """
    from ray._private import node, parameter, services

    began, start_process, get_node = time.monotonic(), services.start_ray_process, services.get_node
    names = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_export_port")
    ports = dict(zip(names, daemons.claim_ports(len(names)), strict=True))

    def start(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        if process_type == "raylet":  # Ray's own Python code does not hand it on
            command = [*command, f"--dashboard_agent_listen_port={ports['dashboard_agent_listen_port']}"]
        started = start_process(command, process_type, *args, **kwargs)
        daemons.add(process_type, started.process, command)
        return started

    def patient(ask: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return ask(*args, **kwargs)
            except RuntimeError as error:  # not yet
                daemons.check()
                if time.monotonic() > began + SECONDS:
                    raise RunError(f"Ray did not start within {SECONDS:.0f} s: {error}") from error
            time.sleep(0.1)

    def no_api_server(*args: Any, **kwargs: Any) -> tuple[None, None]:
        """Where no dashboard is wanted it would count how Ray is used, and be waited for."""
        return None, None

    def wait_for_port(*args: Any, **kwargs: Any) -> int:
        return patient(node_wait, *args, **kwargs | {"timeout_ms": 100})

    node_wait = node.wait_for_persisted_port
    export = {"_metrics_export_port": ports.pop("metrics_export_port")}
    with ExitStack() as stack:
        stack.enter_context(environment(LIMITS))
        stack.enter_context(swapped(services, "start_ray_process", start))
        stack.enter_context(swapped(services, "start_api_server", no_api_server))
        stack.enter_context(swapped(services, "get_node", functools.partial(patient, get_node)))
        stack.enter_context(swapped(node, "wait_for_persisted_port", wait_for_port))
        # no_monitor: there are no other machines that could be added or given back
        made = functools.partial(parameter.RayParams, **ports, no_monitor=True)
        stack.enter_context(swapped(parameter, "RayParams", made))
        yield export


def ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def cause(name: str, command: list[str]) -> str:
    """What it wrote about that, if anything: the last line that is an error or worse."""
    folder = next((part.split("=", 1)[1] for part in command if re.match(r"--log[_-]dir=", part)), None)
    for kind in ("err", "out"):
        log = Path(folder or "", f"{name}.{kind}")
        if folder is None or not log.is_file():
            continue
        lines = re.findall(r"^\[[^\]]+ [CE] \d+ \d+\] \(\w+\) \S+: +(.+)", log.read_text(errors="replace"), re.M)
        if lines:
            words = re.sub(r"^.*Check failed: \S+ ", "", lines[-1]).replace(f"{log.parents[1]}/", "")
            return f": {words[:200].strip()} ({log})"
    return ""


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Variables that the user has not set, for as long as it takes."""
    added = values.keys() - os.environ.keys()
    os.environ.update({name: values[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def swapped(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Something else under a name of a module, for as long as it takes."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
