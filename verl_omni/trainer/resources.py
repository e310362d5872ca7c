"""Devices and Ray: a GPU if there is one, else worker processes on the CPU."""

import os
import secrets
import socket
import subprocess
import sys
import sysconfig
import tempfile
import urllib.parse
from typing import Any

import torch
from omegaconf import DictConfig

from verl_omni.trainer import forked
from verl_omni.trainer.own_ray import FIRST_PORT, ROW, ROWS, Daemons, start_own_ray
from verl_omni.trainer.placement import all_wanted
from verl_omni.utils import cpu_platform


def choose_device(wanted: str | None, address: str | None = None) -> str:
    """`cuda` or `cpu`, for verl too; null takes a GPU if there is one: here, or at the `address` of a Ray."""
    device = _device(wanted, address)
    cpu_platform.tell_verl(device)
    return device


def _device(wanted: str | None, address: str | None) -> str:
    if wanted is None:
        return "cuda" if (torch.cuda.is_available() if address is None else cluster_has_gpus(address)) else "cpu"
    if wanted not in ("cuda", "cpu"):
        raise ValueError(f'trainer.device="{wanted}": expected cuda or cpu')
    if address is not None:
        return wanted
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise ValueError("trainer.device=cuda, but torch sees no GPU here: use trainer.device=cpu")
    if wanted == "cpu" and has_gpu:
        raise ValueError("trainer.device=cpu on a machine with a GPU: hide it with CUDA_VISIBLE_DEVICES= instead")
    return wanted


def cluster_has_gpus(address: str) -> bool:
    """Without connecting to it: what a connection tells all its processes depends on the answer."""
    from ray._private.services import canonicalize_bootstrap_address_or_die
    from ray._raylet import GcsClient

    if address.startswith("ray://"):
        raise ValueError(f"trainer.device is null, and {address} cannot be asked for GPUs: set it to cuda or cpu")
    nodes = GcsClient(address=canonicalize_bootstrap_address_or_die(address)).get_all_node_info()
    return any(node.resources_total.get("GPU") for node in nodes.values())


def rendezvous_ports() -> list[int]:
    """Where the ranks' meeting point may listen: first and last port, above those of Ray and below the system's own.

    A port of the system's may be gone again when the first rank comes to listen, seconds after it was found free.
    """
    return [FIRST_PORT + ROW * ROWS + secrets.randbelow(6_000), 32_767]


def worker_environment(device: str, workers_per_node: int, address: str | None) -> dict[str, str]:
    """Ray gives a process one thread. On a CPU the workers share the cores that this process may use instead, or those
    of the smallest of several machines.

    Set as an environment variable, because a thread pool's size is read anew by every thread that computes.
    """
    if device != "cpu":
        return {}
    cores = torch.get_num_threads() if address is None else _cores_of_a_node()
    return {"OMP_NUM_THREADS": str(max(1, cores // workers_per_node))}


def _cores_of_a_node() -> int:
    import ray

    counts = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return min(filter(None, counts), default=1)


def busy_at_once(config: DictConfig, here: int) -> int:
    """Of `here` processes on a node that train or draw, how many compete for its cores with those that do the other."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    overlap = trainer.mode in ("one_step_off", "fully_async") and trainer.max_staleness != 0
    return trainer.n_gpus_per_node + (rollout.n_gpus_per_node or 1) if overlap else here


def start_ray(config: DictConfig) -> Daemons | None:
    """Connect to `ray.address`, or start a Ray of our own: on loopback, and closed to all who do not know its token."""
    import ray

    if config.ray.address is not None:
        ray.init(address=config.ray.address, **ray_arguments(config))
        return None
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        # One for each run, and in no file: Ray would write its own below HOME. Its processes inherit it.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    check_memory()
    return start_own_ray(ray_arguments(config))


def check_memory() -> None:
    """Ray ends processes on a machine that is full, and starts them again: a run would wait for them for ever."""
    from ray._private.utils import get_system_memory, get_used_memory

    limit = float(os.environ.get("RAY_memory_usage_threshold", 0.95))
    used, there = get_used_memory(), get_system_memory()
    if used > limit * there:
        raise ValueError(
            f"{used / 2**30:.1f} of {there / 2**30:.1f} GiB of this machine's memory are in use, more than the "
            f"{limit:.0%} above which Ray ends processes: free some, or raise RAY_memory_usage_threshold"
        )


def check_answers(address: str, seconds: float = 20) -> None:
    """One line within half a minute where no Ray answers: ray.init tries for four."""
    mistake = f"ray.address={address} does not answer ({{}}): start Ray there, or leave it out to start one here"
    where = urllib.parse.urlsplit(address if "://" in address else f"ray://{address}")
    if address != "auto":
        try:
            socket.create_connection((where.hostname, where.port), timeout=seconds / 4).close()
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(mistake.format(error)) from error
    if address.startswith("ray://"):
        return  # a Ray client server, which has no status to ask for
    status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        answer = subprocess.run(status, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise ValueError(mistake.format(f"nothing within {seconds:.0f} s")) from error
    if answer.returncode:
        if "AuthenticationError" in answer.stderr:
            raise ValueError(
                f"ray.address={address} wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN as where that Ray "
                f"was started"
            )
        *_, last = ["no Ray", *filter(str.strip, answer.stderr.splitlines())]
        raise ValueError(mistake.format(last.strip().split(". ")[0]))


def python_path() -> list[str]:
    """Where this process finds modules, but for Python's own folders: a launcher may have added some."""
    own = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    wanted = [os.getcwd(), *os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    folders = [os.path.abspath(folder) for folder in wanted if os.path.isdir(folder)]
    return list(dict.fromkeys(folder for folder in folders if not folder.startswith(own)))


def ray_arguments(config: DictConfig) -> dict[str, Any]:
    """How to start Ray, or what to tell a running one. Worker processes see the same modules as this one."""
    environment = {name: os.environ[name] for name in config.ray.env_vars} | {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(python_path()),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if config.trainer.device == "cpu":  # whatever there is where they run
        environment |= {"VERL_PLATFORM": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    elif config.ray.address is not None and torch.version.hip is None:  # the runner's node may have no GPU
        environment["VERL_PLATFORM"] = "nvidia"
    arguments = {"runtime_env": {"env_vars": environment}, "logging_level": "ERROR"}
    if config.ray.address is not None:
        return arguments
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if config.trainer.device == "cpu" and (forking := forked.command()):
        arguments["runtime_env"]["py_executable"] = forking
    for library in ("GLOO", "NCCL") if loopback else ():  # ranks on one machine meet on loopback
        environment[f"{library}_SOCKET_IFNAME"] = os.environ.get(f"{library}_SOCKET_IFNAME", loopback[0])
    placed = sum(sum(one.on_nodes) * one.cpus for one in all_wanted(config))
    needed = placed + config.reward.num_workers + config.actor_rollout_ref.rollout.agent.num_workers + 2
    cpus = config.ray.num_cpus or max(os.cpu_count() or 1, needed)
    place = {"_temp_dir": short} if (short := short_folder()) else {}
    # Ray's server would note every call, up to 100,000 of them: 0.1 MiB a step, which only a timeline has a use for.
    notes = {} if config.ray.timeline_json_file else {"task_events_report_interval_ms": 0}
    # Ray's processes of no environment that anybody here asks for: a second of a core each, while others start.
    system = {"prestart_worker_first_driver": False, **notes}
    return arguments | {"num_cpus": cpus, "include_dashboard": False, "_system_config": system, **place}


def short_folder() -> str | None:
    """Where Ray keeps its sockets if the temporary folder, as batch systems name it, is too long for that.

    The path of a socket has 107 bytes, of which Ray's own part takes up to 75. None: where it wants to.
    """
    if given := os.environ.get("RAY_TMPDIR"):
        room = 107 - len(f"/ray/session_YYYY-MM-DD_hh-mm-ss_micros_{os.getpid()}/sockets/plasma_store")
        if len(given.encode()) > room:
            raise ValueError(f"RAY_TMPDIR={given} is too long for Ray's sockets: take one of at most {room} characters")
        return None
    if len(tempfile.gettempdir().encode()) <= 107 - 75:
        return None
    for place in ("/tmp", "/var/tmp", "/dev/shm"):
        if os.access(place, os.W_OK):
            return f"{place}/ray-{os.getuid()}"
    raise ValueError(
        f"the temporary folder {tempfile.gettempdir()} is too long for Ray's sockets: set TMPDIR to one of at most 32 "
        "characters"
    )
