"""vLLM-Omni's diffusion engine, asked for whole batches of samples."""

from typing import Any

import torch
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched.interface import DiffusionRequestStatus
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_omni.pipelines.drawing import Request, Sample
from verl_omni.utils.errors import RequestAborted


class DrawingEngine(DiffusionEngine):
    """One batch at a time: who calls has gathered the requests already."""

    def _init_process_hooks(self, od_config: OmniDiffusionConfig) -> None:
        """Samples leave as the pipeline made them, not as PIL images."""
        self.pre_process_func = self.post_process_func = None

    @property
    def pipeline(self) -> Any:
        return self.executor.worker.model_runner.pipeline

    @property
    def device(self) -> torch.device:
        return self.executor.worker.device

    def draw(self, requests: list[Request]) -> list[Sample]:
        """All of them in one batch, or an error: a smaller one would be slow without a word."""
        names: list[str] = []
        try:
            for i, request in enumerate(requests):
                names.append(self.scheduler.add_request(wrapped(request, i)))
            scheduled = self.scheduler.schedule()
            if scheduled.scheduled_request_ids != names:
                raise RuntimeError(f"vLLM-Omni batches {scheduled.num_scheduled_reqs} of {len(names)} requests")
            results = self.executor.execute_batch(scheduled)
            samples = [results.get_request_output(name).result.output for name in names]
            if isinstance(samples[0], RequestAborted):
                raise samples[0]
            return samples
        finally:
            self.scheduler.finish_requests(names, DiffusionRequestStatus.FINISHED_COMPLETED)
            for name in names:
                self.scheduler.pop_request_state(name)


def wrapped(request: Request, index: int) -> OmniDiffusionRequest:
    """As vLLM-Omni's scheduler and worker want it; its pipeline takes out what is inside."""
    params = OmniDiffusionSamplingParams(seed=request.params["seed"], extra_args={"request": request})
    return OmniDiffusionRequest({"prompt_token_ids": request.prompt_ids}, params, request_id=str(index))
