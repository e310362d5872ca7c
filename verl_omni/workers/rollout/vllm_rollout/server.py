"""The vLLM-Omni engine in a process of its own."""

import torch

from verl_omni.workers.engine.module import on_gpu, resolve_dtypes
from verl_omni.workers.rollout.server import RolloutServer
from verl_omni.workers.rollout.vllm_rollout.engine import VllmOmniRollout


class VllmOmniServer(RolloutServer):
    def load(self, device: torch.device) -> VllmOmniRollout:
        common = self.actor_config.engine
        dtype, _ = resolve_dtypes(common, device, lora=self.model_config.lora_rank > 0)
        compiled = on_gpu(common.use_torch_compile, device)
        return VllmOmniRollout(self.config, self.model_config, dtype, compiled, **self.config.engine_kwargs)
