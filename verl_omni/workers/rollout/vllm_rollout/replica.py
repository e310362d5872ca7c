"""verl's rollout replica with vLLM-Omni: one server, on one device."""

from types import SimpleNamespace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
from verl.plugin.platform import get_platform
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import sort_placement_group_by_node_ip
from verl.utils.device import get_device_name, get_resource_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.workers.rollout.vllm_rollout.http_server import vLLMOmniHttpServer

# What verl multiplies to the number of devices.
ONE_DEVICE = SimpleNamespace(
    tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1, max_num_seqs=1
)


class vLLMOmniReplica(RolloutReplica):
    """`await replica.init_standalone()` starts it; then `replica.server_handle.generate.remote(...)` draws.

    Replica i of a hybrid or colocated rollout is on the device of the i-th process or bundle. It has that to itself or
    sleeps: `await replica.sleep()` before training, `await replica.wake_up()` after.
    """

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 1,
        is_reward_model: bool = False,
        is_teacher_model: bool = False,
        name_suffix: str = "",
    ):
        super().__init__(
            replica_rank, ONE_DEVICE, model_config, gpus_per_node, is_reward_model, is_teacher_model, name_suffix
        )
        self.config = config  # ours, which has no such sizes
        self.server_class = ray.remote(vLLMOmniHttpServer)

    async def init_hybrid(self, worker_group: RayWorkerGroup) -> None:
        """On the device of a training process, in a process of its own."""
        self.rollout_mode = RolloutMode.HYBRID
        worker = self._own(worker_group.workers, "training process")
        self.workers = [worker]
        node, device = await worker.__ray_call__.remote(node_and_device)
        seen = {} if device is None else {get_platform().visible_devices_envvar(): device}
        # The server asks Ray for no device, so Ray has none to tell it.
        told = dict.fromkeys(get_platform().ray_noset_envvars(), "1")
        await self._launch(
            device or "",
            num_cpus=0,  # the worker has asked for one
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            runtime_env={"env_vars": told | seen},
        )

    async def init_hybrid_colocated(self, worker_group: RayWorkerGroup, resource_pool: RayResourcePool) -> None:
        self.resource_pool = resource_pool
        await self.init_hybrid(worker_group)

    async def init_colocated(self, resource_pool: RayResourcePool) -> None:
        """On a device of the pool, beside whoever else is there."""
        self.rollout_mode, self.resource_pool = RolloutMode.COLOCATED, resource_pool
        # verl hands them out in any order the first time, and sorted later
        groups = sort_placement_group_by_node_ip(resource_pool.get_placement_groups(device_name=get_device_name()))
        first = getattr(resource_pool, "start_bundle_index", 0)  # of a part of a pool
        bundles = [(group, i) for group in groups for i in range(group.bundle_count)][first:]
        group, index = self._own(bundles[: resource_pool.world_size], "bundle")
        await self._launch(
            num_cpus=1,
            num_gpus=1 / resource_pool.max_colocate_count if resource_pool.use_gpu else 0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )

    def _own(self, places: list[Any], kind: str) -> Any:
        if self.replica_rank >= len(places):
            raise ValueError(
                f"replica {self.replica_rank} has no {kind} of its own: there are {len(places)}, and they count from 0"
            )
        return places[self.replica_rank]

    async def init_standalone(self) -> None:
        """verl starts workers that hold the devices of a server; this server holds its own."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        await self._launch(num_cpus=1, num_gpus=0 if get_device_name() == "cpu" else 1)

    async def clear_kv_cache(self) -> None:
        """A denoiser has none."""

    release_kv_cache = resume_kv_cache = clear_kv_cache

    async def _launch(self, devices: str = "", **options: Any) -> None:
        server = self.server_class.options(max_concurrency=self.max_concurrency, **options).remote(
            config=self.config,
            model_config=self.model_config,
            rollout_mode=self.rollout_mode,
            workers=self.workers,
            replica_rank=self.replica_rank,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices=devices,
        )
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def node_and_device(worker: Any) -> tuple[str, str | None]:
    """Of the process that is asked."""
    context = ray.get_runtime_context()
    devices = [] if get_device_name() == "cpu" else context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), next(iter(devices), None)


RolloutReplicaRegistry.register("vllm_omni", lambda: vLLMOmniReplica)
