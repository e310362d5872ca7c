"""Ray's workers on a CPU as forks of one process that has imported the libraries.

To import torch and its companions is most of the start of a small run, in each of its processes anew. So the driver
forks a process once it has them, and before it knows verl and Ray. It waits, and Ray starts its workers by
`ask_for_fork.py`, which asks for a fork of it. A fork becomes what a started Python would be: arguments, environment,
folder, files and how many it may open, where modules are found, what is random, how many threads compute. It says so to
who asked. Where it cannot, as a library may have read a variable on import that is another one for the worker, it says
why in the worker's log and ends, and who asked starts Python after all.
"""

import atexit
import ctypes
import gc
import hmac
import importlib
import logging
import marshal
import os
import resource
import secrets
import selectors
import shlex
import signal
import socket
import struct
import sys
import sysconfig
import threading
import types
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from verl_omni.trainer import ask_for_fork, progress

# What all processes of a run import. Ray and verl are not among it: they read their environment then.
LIBRARIES = ("torch._dynamo", "tensordict", "transformers.modeling_utils", "datasets", "pandas", "aiohttp")
# What those import that hold a model, and what Ray and verl take from others; the process that waits has the time.
FOR_WORKERS = (
    "peft", "diffusers.pipelines.pipeline_utils", "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict", "pydantic.main", "pydantic.dataclasses", "pydantic.v1", "jsonschema",
    "google.protobuf.json_format", "zmq",
)  # fmt: skip
# Variables that may differ: libraries read these when they are used, or not at all.
READ_LATER = {
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS",
    "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WG_BACKEND", "WG_PREFIX",
    "REDIS_STORE_SERVER_HOST", "PYTHONPATH", "PYTHONBREAKPOINT", "PWD", "OLDPWD", "SHLVL", "_", "SPT_NOENV",
    "LAZY_LEGACY_OP", "TORCH_CUDA_ARCH_LIST",  # verl sets them on its own import, which is yet to come
    "PS1", "PS2", "PS4",  # a virtual environment exports its prompt, and Ray's shell drops it
}  # fmt: skip
OF_THE_REST = ("RAY_", "VERL_", "VEOMNI_", "VLLM_")  # of what is not imported yet
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # for the driver, which may have a step to finish and to save
SECONDS_TO_ASK = 10.0  # for somebody who is stopped in it: all others wait
PR_SET_PDEATHSIG = 1

_name: str | None = None  # where to ask for forks


class Wanted(NamedTuple):
    """What a worker would be started with."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]
    connection: socket.socket  # to who asked
    asker: int


class Differs(Exception):
    """A fork would not be what a started process is."""


# In the driver.


def import_libraries() -> None:
    for library in LIBRARIES:
        importlib.import_module(library)


def prepare() -> None:
    """With the libraries imported. Does nothing where forks would not be what they should be."""
    global _name
    known, threads = {"ray", "verl"} & sys.modules.keys(), threading.active_count()
    if sys.platform != "linux" or known or threads > 1 or sys.modules["torch"].cuda.is_available():
        return
    name, key = f"verl-omni-{secrets.token_hex(16)}", secrets.token_hex(ask_for_fork.KEY_SIZE // 2)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"\0{name}")  # leaves no file behind
    listening.listen(128)
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        run(listening, key)
    listening.close()
    _name = name
    os.environ[ask_for_fork.KEY] = key  # for Ray, and so for who asks: arguments and names of sockets anybody can list


def command() -> str | None:
    """What starts a worker in place of `python`; None where nobody could be asked for a fork."""
    if _name is None:
        return None
    return shlex.join([sys.executable, "-I", "-S", ask_for_fork.__file__, _name])


# In the process that waits, and in its forks.


def run(listening: socket.socket, key: str) -> None:
    """To the end of this process: nothing of the driver, of which it is a copy, may go on here."""
    code = 1
    try:
        wait_and_become(listening, key)()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait_and_become(listening: socket.socket, key: str) -> Callable[[], Any]:
    """In each fork, what it is to run."""
    die_with_parent()
    os.setsid()  # a Ctrl-C is for the driver
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    progress.report_to_nobody()
    if hydra := sys.modules.get("hydra.core.global_hydra"):  # which has composed the driver's configuration
        hydra.GlobalHydra.instance().clear()
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    here = dict(os.environ)
    for library in FOR_WORKERS:
        with suppress(Exception):  # of whatever kind: a worker that needs it will say so
            importlib.import_module(library)
    gc.enable()
    gc.collect()
    gc.freeze()  # a pass over all that would copy it into every fork
    wanted = serve(listening, key)
    try:
        die_with_parent()
        os.setsid()
        os.chdir(wanted.folder)
        for number, file in enumerate(wanted.streams):
            os.dup2(file, number)
            os.close(file)
        for number, handler in before.items():
            signal.signal(number, handler)
        check_environment(here, wanted.environment)
        be_killed_as_early_as(wanted.asker)
        take_limits(wanted.asker)
        ready = become(wanted.arguments, wanted.environment)
        wanted.connection.send(ask_for_fork.READY)
        wanted.connection.close()
        return ready
    except Exception as error:  # nothing of the worker has run yet: Python can still be started
        print(f"no fork of the libraries, Python is started: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)


def serve(listening: socket.socket, key: str) -> Wanted:
    """Fork for whoever asks; returns in forks only. Who asked ends with its fork, and the fork with who asked.

    That a fork has ended is told by SIGCHLD: conda's Python, and uv's until 2026, were compiled with headers of before
    pidfds.
    """
    selector, asked = selectors.DefaultSelector(), {}
    ended, wakeup = os.pipe()
    for end in (ended, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    selector.register(listening, selectors.EVENT_READ)
    selector.register(ended, selectors.EVENT_READ)
    while True:
        chosen, _ = selector.select()[0]
        if chosen.fileobj is listening:
            connection, _ = listening.accept()
            wanted = hear(connection, key)
            pid = fork_or_none() if wanted else None
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                for other in list(selector.get_map().values()):
                    os.close(other.fd)
                os.close(wakeup)
                selector.close()
                return wanted
            for file in wanted.streams if wanted else ():
                os.close(file)
            if pid is None:
                connection.close()
                continue
            asked[pid] = connection
            selector.register(connection, selectors.EVENT_READ, pid)
        elif chosen.fileobj == ended:
            os.read(ended, 4096)
            for pid in [pid for pid in asked if os.waitpid(pid, os.WNOHANG)[0]]:
                connection = asked.pop(pid)
                selector.unregister(connection)
                connection.close()
        else:  # who asked has gone; nobody else has this number before it is waited for
            os.kill(chosen.data, signal.SIGKILL)
            os.waitpid(chosen.data, 0)
            selector.unregister(asked.pop(chosen.data))
            chosen.fileobj.close()


def fork_or_none() -> int | None:
    """None where the machine has no room for a process more; those that are there go on."""
    try:
        return os.fork()
    except OSError:
        return None


def hear(connection: socket.socket, key: str) -> Wanted | None:
    """What somebody wants who is this user too, knows the key and has not left. Others are left without an answer."""
    asker, user, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user != os.getuid():
        return None
    streams, said = [], b""
    connection.settimeout(SECONDS_TO_ASK)
    try:
        head, streams, *_ = socket.recv_fds(connection, ask_for_fork.KEY_SIZE + 4, 3)
        told, size = head[: ask_for_fork.KEY_SIZE], head[ask_for_fork.KEY_SIZE :]
        if not hmac.compare_digest(told, key.encode()) or len(size) != 4 or len(streams) != 3:
            raise ConnectionError
        while len(said) < int.from_bytes(size, "little"):
            more = connection.recv(65536)
            if not more:
                raise ConnectionError
            said += more
        return Wanted(*marshal.loads(said), streams, connection, asker)
    except (OSError, EOFError, TypeError, ValueError):  # marshal's among them; the forks that are there have to go on
        for file in streams:
            os.close(file)
        return None


# In a fork.


def check_environment(here: dict[str, str], there: dict[str, str]) -> None:
    """`Differs` where a library that is imported may have read what is different there."""
    changed = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)} - READ_LATER
    if changed := {name for name in changed if not name.startswith(OF_THE_REST)}:
        raise Differs(f"{', '.join(sorted(changed))}: another value than on import")
    told = there.get("OMP_NUM_THREADS")
    if told != here.get("OMP_NUM_THREADS") and told not in (None, "1", str(sys.modules["torch"].get_num_threads())):
        raise Differs("MKL would not share its work out in the same way")


def be_killed_as_early_as(asker: int) -> None:
    """Where memory runs out: Ray has told the kernel to take the process that it started before others."""
    wanted, own = (Path(f"/proc/{who}/oom_score_adj") for who in (asker, "self"))
    if own.read_text() != (score := wanted.read_text()):
        own.write_text(score)


def take_limits(asker: int) -> None:
    """Ray lets its driver open more files, and so all that it starts: `ulimit -n` is 1024 for most."""
    resource.setrlimit(resource.RLIMIT_NOFILE, resource.prlimit(asker, resource.RLIMIT_NOFILE))


def become(arguments: list[str], environment: dict[str, str]) -> Callable[[], Any]:
    """`python ARGUMENTS` up to its first line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    sys.modules["numpy"].random.seed()
    sys.modules["torch"].default_generator.seed()
    sys.orig_argv = [sys.executable, *arguments]
    sys.argv = arguments[arguments[0] == "-u" :]
    script = os.path.abspath(sys.argv[0])
    python = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    own = [path for path in sys.path if path.startswith(python) or not os.path.isdir(path)]
    given = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.path.dirname(script), *given, *own]
    importlib.invalidate_caches()
    take_threads()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    code = compile(Path(script).read_bytes(), script, "exec")
    return lambda: exec(code, main.__dict__)


def take_threads() -> None:
    """As many as OMP_NUM_THREADS says. Ray may set it later, when it knows whose process this is."""
    if told := os.environ.get("OMP_NUM_THREADS"):
        set_threads(int(told))
        return
    from ray._private import utils

    tell = getattr(utils, "set_omp_num_threads_if_unset", None)
    if tell is None:
        raise Differs("this Ray sets OMP_NUM_THREADS in another way")

    def tell_libraries_too() -> bool:
        told = tell()
        if told:
            set_threads(int(os.environ["OMP_NUM_THREADS"]))
        return told

    utils.set_omp_num_threads_if_unset = tell_libraries_too


def set_threads(count: int) -> None:
    """Of libraries that have read the variable, when they were loaded."""
    torch = sys.modules["torch"]
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
    mapped = Path("/proc/self/maps").read_text().splitlines()
    for path in {line.split()[-1] for line in mapped if "openblas" in line}:
        library = ctypes.CDLL(path)
        for name in ("openblas_set_num_threads", "scipy_openblas_set_num_threads"):
            for set_count in filter(None, (getattr(library, name + end, None) for end in ("", "64_"))):
                set_count(count)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
