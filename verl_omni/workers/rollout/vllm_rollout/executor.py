"""vLLM-Omni's worker in the process that asks it: for an engine of one device.

Its own executor starts a process and sends requests, answers and weights through pipes. Here they are handed over.
"""

import os
from typing import Any

import torch
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm_omni.diffusion.executor.abstract import DiffusionExecutor
from vllm_omni.diffusion.sched.interface import DiffusionSchedulerOutput
from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase
from vllm_omni.diffusion.worker.utils import BaseRunnerOutput
from vllm_omni.platforms import current_omni_platform
from vllm_omni.plugins import load_omni_general_plugins


class InProcessExecutor(DiffusionExecutor):
    def _init_executor(self) -> None:
        load_omni_general_plugins()
        before = dict(os.environ)
        self.worker = WorkerWrapperBase(
            gpu_id=torch.accelerator.current_device_index() if torch.accelerator.is_available() else 0,
            od_config=self.od_config,
            base_worker_class=resolve_obj_by_qualname(current_omni_platform.get_diffusion_worker_cls()),
            worker_extension_cls=self.od_config.worker_extension_cls,
            custom_pipeline_args=self.od_config.custom_pipeline_args,
        )
        # It takes itself for the first of all ranks. They have met already, and who asks later is told the truth.
        for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        self._closed = False

    @property
    def is_dead(self) -> bool:
        return self._closed

    def execute_batch(self, scheduler_output: DiffusionSchedulerOutput) -> BaseRunnerOutput:
        return self.worker.execute_method("execute_model_batch", scheduler_output, self.od_config)

    execute_request = execute_batch  # a batch of one

    def execute_step(self, scheduler_output: DiffusionSchedulerOutput) -> BaseRunnerOutput:
        return self.worker.execute_stepwise(scheduler_output)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
        exec_all_ranks: bool = False,
    ) -> Any:
        answer = self.worker.execute_method(method, *args, **(kwargs or {}))
        return [answer] if unique_reply_rank is None else answer

    def check_health(self) -> None:
        if self._closed:
            raise RuntimeError("the executor is closed")

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self.worker.shutdown()
