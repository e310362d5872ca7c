"""The vLLM-Omni engine in a process of its own."""

import torch

from verl_omni.workers.engine.module import resolve_dtypes
from verl_omni.workers.rollout.server import RolloutServer
from verl_omni.workers.rollout.vllm_rollout.engine import VllmOmniRollout


class VllmOmniServer(RolloutServer):
    def load(self, device: torch.device) -> VllmOmniRollout:
        dtype, _ = resolve_dtypes(self.actor_config.fsdp_config, device, lora=self.model_config.lora_rank > 0)
        return VllmOmniRollout(self.config, self.model_config, dtype, **self.config.engine_kwargs)
