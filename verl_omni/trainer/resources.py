"""Devices and Ray: a GPU if there is one, else worker processes on the CPU."""

import os
import secrets
from typing import Any

import torch
from omegaconf import DictConfig
from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)


def choose_device(wanted: str | None) -> str:
    """`cuda` or `cpu`; null takes a GPU if there is one."""
    has_gpu = torch.cuda.is_available()
    if wanted is None:
        return "cuda" if has_gpu else "cpu"
    if wanted not in ("cuda", "cpu"):
        raise ValueError(f'trainer.device="{wanted}": expected cuda or cpu')
    if wanted == "cuda" and not has_gpu:
        raise ValueError("trainer.device=cuda, but torch sees no GPU here: use trainer.device=cpu")
    if wanted == "cpu" and has_gpu:
        raise ValueError("trainer.device=cpu on a machine with a GPU: hide it with CUDA_VISIBLE_DEVICES= instead")
    return wanted


def rendezvous_ports() -> list[int]:
    """Where the ranks' meeting point may listen: first and last port, above Ray's and below the system's own.

    A port of the system's may be gone again when the first rank comes to listen, seconds after it was found free.
    """
    return [20_000 + secrets.randbelow(12_000), 32_767]


class DeviceResourcePoolManager(ResourcePoolManager):
    """verl's pools, which on a machine without GPUs are made of processes alone."""

    def create_resource_pool(self) -> None:
        from verl.utils.device import get_device_name

        if get_device_name() != "cpu":
            return super().create_resource_pool()
        for name, processes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=processes, use_gpu=False, max_colocate_count=1, name_prefix=name
            )


def worker_environment(device: str, workers_per_node: int) -> dict[str, str]:
    """Ray gives a process one thread. On a CPU the workers share the cores that this process may use instead.

    Set as an environment variable, because a thread pool's size is read anew by every thread that computes.
    """
    if device != "cpu":
        return {}
    return {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // workers_per_node))}


def ray_arguments(config: DictConfig) -> dict[str, Any]:
    """How to start (or find) Ray. Worker processes see the same modules as this one."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")])),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    arguments = {"runtime_env": {"env_vars": environment}, "logging_level": "ERROR"}
    if config.ray.address is not None:
        return arguments | {"address": config.ray.address}
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    needed = 4 * workers + config.reward.num_workers + config.actor_rollout_ref.rollout.agent.num_workers + 2
    cpus = config.ray.num_cpus or max(os.cpu_count() or 1, needed)
    return arguments | {"num_cpus": cpus, "include_dashboard": False}
