"""Processes of runs, forked from one that has imported the libraries: that takes longer than most of what runs do here.

A test process has one such process, from its first run on to its end. A fork becomes what a started Python would be:
arguments, environment, folder, open files, where modules are found, what is random. Libraries read some variables of
the environment when they are imported: where one differs that is not known to be read later, Python is started after
all. Ray is told in `start_ray_process` to let `warm_fork.py` ask for its workers. For Linux only.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import marshal
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import warm_fork

HERE = Path(__file__).parent
LIBRARIES = [
    "verl_omni.testing.local_trainer", "verl_omni.cli.train", "ray._private.runtime_env.setup_hook",
    "ray._private.log_monitor", "aiohttp", "grpc.aio",
]  # fmt: skip
# What may differ from the environment in which the libraries were imported: nobody had read these.
READ_LATER = {
    "PYTHON", "PYTHONPATH", "PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST", "KEEP_METRICS",
    "HYDRA_FULL_ERROR", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
    "LD_LIBRARY_PATH", "WANDB_SERVICE", "COLUMNS", "LINES",  # set by cv2, wandb, readline once a test has loaded them
    # set for ranks
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE",
    "REDIS_STORE_SERVER_HOST", "WG_BACKEND", "WG_PREFIX",
    # set by Ray and for it
    "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_JOB_ID", "RAY_NODE_ID", "RAY_RAYLET_PID",
    "RAY_LD_PRELOAD_ON_WORKERS", "PYTHONBREAKPOINT",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "RAY_enable_pipe_based_agent_to_parent_health_check", "SPT_NOENV",
    "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_STREAM", "VERL_OMNI_HOME", "VERL_OMNI_HOME_KEY",  # set by a run; no vLLM here
    "LD_PRELOAD",  # of its daemons, to measure their memory
}  # fmt: skip
# Ray's C++ reads these when it is loaded and never again. A worker of no job takes any; it looks whether a process of
# this number is there, where it would look after its raylet, and warm_fork.py does that.
FIXED = {"RAY_JOB_ID": "ffffffff", "RAY_RAYLET_PID": str(os.getpid())}
PR_SET_PDEATHSIG = 1
START = dict(os.environ)
WORKS = sys.platform == "linux" and hasattr(os, "pidfd_open")  # not in conda's Python
ROOM = "WARM_ROOM"  # a variable that leaves room for the environment of a fork


# In a test's process.


class Fork:
    """What a test asks of subprocess.Popen."""

    def __init__(self, arguments: list[str], cwd: Path, env: dict[str, str], stdout: io.IOBase):
        with open(os.devnull) as nothing:
            files = [nothing.fileno(), stdout.fileno(), stdout.fileno()]
            self._said = warm_fork.ask(address(), arguments, env, str(cwd), files)
        self.pid, self.returncode = warm_fork.number(self._said), None
        assert self.pid is not None, gone()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._said, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self.returncode = warm_fork.number(self._said)
            assert self.returncode is not None, gone()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_warm: tuple[str, subprocess.Popen] | None = None


def address() -> str:
    """Where to ask. Who asks first starts it; it ends with this process, and all of its forks with it."""
    global _warm
    if _warm is None:
        place = os.path.join(tempfile.mkdtemp(prefix="warm-"), "socket")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(place)
            listening.listen(128)
            # Ray names a process within the room of its first arguments.
            command = [sys.executable, __file__, place, str(listening.fileno()), "x" * 4000]
            environment = os.environ | FIXED | {ROOM: "x" * 60_000, "PYTHONPATH": str(HERE.parent)}
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, pass_fds=[listening.fileno()], start_new_session=True
            )
        _warm = place, process
    assert _warm[1].poll() is None, gone()
    return _warm[0]


def gone() -> str:
    return f"tests/warm.py has ended: {_warm[1].wait()}"


def python(place: str | None = None) -> list[str]:
    """A command that is used like Python's, with a file or `-m` and a module, and forks."""
    return [sys.executable, "-I", "-S", warm_fork.__file__, place or address()]


def quick_python() -> list[str]:
    """For a script of which it does not matter that it imports the libraries itself."""
    return python() if WORKS else [sys.executable]


def let_ray_fork(place: str | None = None) -> None:
    """For the Python processes of Rays that this process starts. `place`: where to ask for them."""
    from ray._private import services

    start = services.start_ray_process
    if hasattr(start, "warm"):
        return

    def start_ray_process(command: list[str], *arguments, **options):
        return start(asking(command, place), *arguments, **options)

    start_ray_process.warm = True
    services.start_ray_process = start_ray_process


def asking(command: list[str], place: str | None) -> list[str]:
    """That of one of Ray's daemons, or that of a raylet, which starts the rest."""
    if command[0] == sys.executable:
        return python(place) + command[1:]
    options = ("--python_worker_command=", "--dashboard_agent_command=", "--runtime_env_agent_command=")
    asked = [f"{option}{sys.executable} " for option in options]
    changed = [
        part.replace(sys.executable, " ".join(python(place)), 1) if part.startswith(tuple(asked)) else part
        for part in command
    ]
    if "raylet" in os.path.basename(command[0]):
        assert sum(one != other for one, other in zip(command, changed, strict=True)) == len(options), command
    return changed


# In the process that has imported the libraries.


def serve(listening: socket.socket) -> tuple | None:
    """Fork for whoever asks. Returns what is wanted in each fork, and None when nobody is left who could ask."""
    selector, forks = selectors.DefaultSelector(), {}
    selector.register(0, selectors.EVENT_READ)
    selector.register(listening, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:  # the test's process has ended
                shutil.rmtree(os.path.dirname(listening.getsockname()))
                return end_all(forks.values())
            if key.fileobj is listening:
                connection, _ = listening.accept()
                wanted, files = hear(connection)
                pid = os.fork() if wanted is not None else None
                if pid == 0:
                    listening.close()
                    selector.close()
                    for other in (connection, *forks):
                        other.close()
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                        os.close(file)
                    return wanted
                for file in files:
                    os.close(file)
                if pid is None:
                    connection.close()
                    continue
                forks[connection] = pid
                say(connection, pid)
                selector.register(connection, selectors.EVENT_READ)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, connection)
            elif key.data is None:
                if key.fileobj in forks:  # who asked was killed, and so is who it asked for
                    selector.unregister(key.fileobj)
                    os.kill(forks[key.fileobj], signal.SIGKILL)
            else:
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                code = os.waitstatus_to_exitcode(os.waitpid(forks.pop(key.data), 0)[1])
                say(key.data, code)
                if key.data in (one.fileobj for one in selector.get_map().values()):
                    selector.unregister(key.data)
                key.data.close()


def end_all(forks: Iterable[int]) -> None:
    for pid in forks:
        os.kill(pid, signal.SIGKILL)


def say(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody hears it
        connection.sendall(number.to_bytes(4, "little", signed=True))


def hear(connection: socket.socket) -> tuple[tuple | None, list[int]]:
    """What somebody wants: arguments, environment and folder of a process, and its files."""
    files, wanted = [], b""
    try:
        size, files, *_ = socket.recv_fds(connection, 4, 3)
        while not size or len(wanted) < int.from_bytes(size, "little"):
            more = connection.recv(65536)
            if not more:
                return None, files
            wanted += more
    except ConnectionError:  # it was killed while it asked
        return None, files
    return marshal.loads(wanted), files


# In a fork.


class Differs(Exception):
    """A fork would not be what a started process is."""


def become(arguments: list[str], environment: dict[str, str], folder: str, own: list[str]) -> Callable[[], None]:
    """`python ARGUMENTS` in that folder, up to its first line."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.chdir(folder)
    unbuffered = arguments[0] == "-u" or bool(environment.get("PYTHONUNBUFFERED"))
    arguments = arguments[arguments[0] == "-u" :]
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        raw = open(number, f"{mode}b", buffering=0 if unbuffered and number else -1, closefd=False)
        stream = io.TextIOWrapper(
            raw, encoding=getattr(sys, name).encoding, errors=getattr(sys, name).errors,
            line_buffering=number == 2, write_through=unbuffered and number > 0,
        )  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if os.path.basename(arguments[0]) == "setup_worker.py":
        arguments, environment = without_setup(arguments[1:], environment)
    take(environment)
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    sys.orig_argv = [sys.executable, *arguments]
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    importlib.invalidate_caches()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[:] = [folder, *paths, *own]
        return functools.partial(runpy.run_module, arguments[1], run_name="__main__", alter_sys=True)
    sys.argv = arguments
    sys.path[:] = [os.path.dirname(os.path.abspath(arguments[0])), *paths, *own]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=arguments[0], __builtins__=__builtins__)
    return functools.partial(exec, compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), main.__dict__)


def without_setup(arguments: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What Ray's setup_worker.py does before it becomes the worker: it sets variables."""
    from ray._private.utils import update_envs

    options = {"--language": "PYTHON", "--serialized-runtime-env-context": "{}"}
    left = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name in options:
            options[name] = value
        else:
            left.append(argument)
    context = json.loads(options["--serialized-runtime-env-context"])
    env_vars = context.pop("env_vars", {})
    asked = {
        name: value for name, value in context.items() if value and (name, value) != ("py_executable", sys.executable)
    }
    if options["--language"] != "PYTHON" or asked:
        raise Differs(f"Ray's setup_worker.py does more than to set variables: {options}")
    kept = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    update_envs(env_vars)
    environment = dict(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    return left, environment


def take(environment: dict[str, str]) -> None:
    """As the environment of this process, also for those who look at it from outside."""
    imported = {name: value for name, value in os.environ.items() if START.get(name) != value}  # set by libraries
    changed = {name for name in START | environment if environment.get(name) != START.get(name)} - {ROOM}
    changed -= {name for name in changed if name in environment and environment[name] == imported.get(name)}
    if changed - READ_LATER:
        raise Differs(f"may the libraries be imported before these are set? {sorted(changed - READ_LATER)}")
    os.environ.clear()
    os.environ.update(imported | environment)
    from ray._raylet import Config

    Config.initialize("")  # Ray's C++ reads its variables again
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    first, end = map(int, numbers[47:49])  # env_start, env_end
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    if len(block) > end - first:
        raise Differs(f"an environment of {len(block)} bytes is more than there is room for")
    ctypes.memset(first, 0, end - first)
    ctypes.memmove(first, block, len(block))


def drawn_by_the_system() -> Any:
    from ray._raylet import ActorClassID

    return ActorClassID(os.urandom(ActorClassID.size()))


def draw_in_a_fork() -> bytes:
    from ray._raylet import ObjectRef

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, ObjectRef.from_random().binary())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writer)
    with open(reader, "rb") as drawn:
        return drawn.read()


def main() -> None:
    place, listening, *_ = sys.argv[1:]
    # Ray draws a number for each actor class. What its generator starts from must not be drawn before the forks.
    with mock.patch("ray.actor.ActorClassID", SimpleNamespace(from_random=drawn_by_the_system)):
        for library in LIBRARIES:
            importlib.import_module(library)
    own = [path for path in sys.path if path not in (str(HERE), str(HERE.parent))]
    let_ray_fork(place)
    assert threading.active_count() == 1, threading.enumerate()
    assert "ray.dashboard.consts" not in sys.modules, "it reads variables of READ_LATER when it is imported"
    assert draw_in_a_fork() != draw_in_a_fork(), "Ray's forks would give the same names to their objects"
    gc.collect()
    gc.freeze()
    wanted = serve(socket.socket(fileno=int(listening)))
    if wanted is None:
        return
    arguments, environment, folder = wanted
    try:
        run = become(arguments, environment, folder, own)
    except Differs:
        os.execve(sys.executable, [sys.executable, *arguments], environment)
    run()


if __name__ == "__main__":
    main()
