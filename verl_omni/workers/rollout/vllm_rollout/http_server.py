"""vLLM-Omni's engine in a process of its own, as verl's rollout replicas start it: without a run around it."""

import asyncio
import dataclasses
import os
import secrets
from typing import Any
from urllib.parse import urlsplit

from omegaconf import DictConfig, OmegaConf
from ray.actor import ActorHandle
from verl.workers.rollout.replica import RolloutMode

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.algorithms.registry import fill_nulls, resolve_algorithm_defaults
from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
)
from verl_omni.config.knob import MOST_SEED
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.vllm_omni import INSTALL, installed
from verl_omni.utils.errors import RequestAborted
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.vllm_rollout.server import VllmOmniServer


class vLLMOmniHttpServer(VllmOmniServer):
    """A server of one device. It draws with the weights of the model's folder until it gets others."""

    def __init__(
        self,
        config: DiffusionRolloutConfig | DictConfig,
        model_config: DiffusionModelConfig | DictConfig,
        rollout_mode: RolloutMode,
        workers: list[ActorHandle],
        replica_rank: int,
        node_rank: int,
        gpus_per_node: int,
        nnodes: int,
        cuda_visible_devices: str,
    ):
        """`workers` are processes beside it on the device, if there are any. An empty `cuda_visible_devices` leaves the
        choice of the device to Ray."""
        if nnodes != 1 or gpus_per_node > 1 or node_rank != 0:
            raise ValueError(
                f"vLLMOmniHttpServer has one device on one node, not {gpus_per_node} on each of {nnodes}: start a "
                "replica for each device"
            )
        if not installed():
            raise ValueError(f"vLLMOmniHttpServer: vllm-omni is not installed here: type {INSTALL}")
        if cuda_visible_devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        rollout, model = filled(config, model_config)
        self.set_up(DiffusionActorConfig(), model, rollout)
        self.replica_rank, self._refuses = replica_rank, False

    async def launch_server(
        self, master_address: str | None = None, master_port: int | None = None, dp_rpc_port: int | None = None
    ) -> None:
        """Load the model and listen, as `http` of the config says, else on a free port of this machine. The arguments
        are for servers of several nodes."""
        port = self.config.http.port
        await self.listen(port + self.replica_rank if port else 0)
        await self.start()
        self._has_weights.set()

    async def get_server_address(self) -> tuple[str, int]:
        parts = urlsplit(self._http.address)
        return parts.hostname, parts.port

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        negative_prompt_ids: list[int] | None = None,
        priority: int = 0,
    ) -> RolloutOutput:
        """Tokens in, image out (`RolloutEngine.generate`). Without a `seed` every answer is another."""
        return await super().generate(
            prompt_ids=prompt_ids,
            sampling_params={"seed": secrets.randbelow(MOST_SEED)} | sampling_params,
            request_id=request_id,
            image_data=image_data,
            video_data=video_data,
            negative_prompt_ids=negative_prompt_ids,
            priority=priority,
        )

    def check_room(self, sampling_params: dict[str, Any]) -> None:
        if self._refuses:
            self._gone(sampling_params)
            raise RequestAborted("all requests were aborted, and this rollout server takes no others for now")
        super().check_room(sampling_params)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """As verl asks for it; the second argument is about a cache that denoisers do not have."""
        return {"aborted": await self.abort(request_id), "request_id": request_id}

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """None is drawn before `resume_generation`: those that come meanwhile wait, as do people's over HTTP, or are
        refused."""
        self.engine.hold("abort")
        self._refuses = reject_request
        names = self._under_way.abort_all()
        await asyncio.to_thread(self.engine.drain)
        return {"aborted_count": len(names), "request_ids": names}

    async def resume_generation(self) -> None:
        self._refuses = False
        self.engine.resume("abort")

    async def sleep(self) -> None:
        """The model leaves the device; requests wait."""
        self.engine.hold("sleep")
        await asyncio.to_thread(self.engine.drain)
        self.engine.sleep()

    async def wake_up(self) -> None:
        self.engine.wake()
        self.engine.resume("sleep")


def filled(config: Any, model_config: Any) -> tuple[DiffusionRolloutConfig, DiffusionModelConfig]:
    """Both as dataclasses. What is left null becomes the algorithm's choice, or the model's, as in a run."""
    rollout, model = (OmegaConf.to_object(c) if OmegaConf.is_config(c) else c for c in (config, model_config))
    adapter = DiffusionModelBase.get_class(model)
    defaults = f"the pipeline defaults of {adapter.__name__}"
    pipeline = fill_nulls(rollout.pipeline, adapter.pipeline_defaults, defaults)
    algo, _ = resolve_algorithm_defaults(model.algorithm, rollout.algo, DiffusionLossConfig())
    return (
        dataclasses.replace(rollout, pipeline=pipeline, algo=algo),
        dataclasses.replace(model, pipeline=pipeline, algo=algo),
    )
