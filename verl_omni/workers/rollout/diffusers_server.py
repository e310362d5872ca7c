"""The diffusers engine in a process of its own."""

import functools

import torch

from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.compile.attention import attention_choice
from verl_omni.workers.engine.compile.blocks import compile_blocks
from verl_omni.workers.engine.compile.fused_gelu import fuse_gelu
from verl_omni.workers.engine.module import autocast, build_module, fill_module, on_gpu, resolve_dtypes
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout
from verl_omni.workers.rollout.server import RolloutServer


class DiffusersServer(RolloutServer):
    def load(self, device: torch.device) -> DiffusersRollout:
        engine_config = self.actor_config.fsdp_config
        dtype, model_dtype = resolve_dtypes(engine_config, device, lora=self.model_config.lora_rank > 0)
        adapter = DiffusionModelBase.get_class(self.model_config)
        attention, _ = attention_choice(engine_config.attention_backend, adapter, device, dtype)
        module, parts = build_module(self.model_config, engine_config.seed, model_dtype, attention)
        if on_gpu(engine_config.use_torch_compile, device):
            if on_gpu(engine_config.fused_gelu, device):
                for part in parts.values():
                    fuse_gelu(part)
            compile_blocks(parts)
        fill_module(module, self.model_config, device, model_dtype)
        module.eval()
        return DiffusersRollout(
            self.config,
            self.model_config,
            module,
            device,
            dtype,
            autocast=functools.partial(autocast, device, dtype),
            **self.config.engine_kwargs,
        )
