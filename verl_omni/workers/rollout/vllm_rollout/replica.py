"""verl's rollout replica with vLLM-Omni: one server, on one device."""

from types import SimpleNamespace
from typing import Any

import ray
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.utils.device import get_device_name
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.workers.rollout.vllm_rollout.http_server import check_mode, vLLMOmniHttpServer

# What verl multiplies to the number of devices.
ONE_DEVICE = SimpleNamespace(
    tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1, max_num_seqs=1
)


class vLLMOmniReplica(RolloutReplica):
    """`await replica.init_standalone()` starts it; then `replica.server_handle.generate.remote(...)` draws."""

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
        check_mode(RolloutMode.HYBRID)

    async def init_hybrid_colocated(self, worker_group: RayWorkerGroup, resource_pool: RayResourcePool) -> None:
        check_mode(RolloutMode.HYBRID)

    async def init_colocated(self, resource_pool: RayResourcePool) -> None:
        check_mode(RolloutMode.COLOCATED)

    async def init_standalone(self) -> None:
        """verl starts workers that hold the devices of a server; this server holds its own."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def launch_servers(self) -> None:
        server = self.server_class.options(
            num_cpus=1, num_gpus=0 if get_device_name() == "cpu" else 1, max_concurrency=self.max_concurrency
        ).remote(
            config=self.config,
            model_config=self.model_config,
            rollout_mode=self.rollout_mode,
            workers=[],
            replica_rank=self.replica_rank,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="",
        )
        await server.launch_server.remote()
        host, port = await server.get_server_address.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


RolloutReplicaRegistry.register("vllm_omni", lambda: vLLMOmniReplica)
