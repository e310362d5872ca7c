"""The diffusers engine in a process of its own."""

import functools

import torch

from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.compile.attention import attention_choice
from verl_omni.workers.engine.compile.blocks import compile_blocks
from verl_omni.workers.engine.compile.fused_gelu import fuse_gelu
from verl_omni.workers.engine.fp8 import Fp8Layers
from verl_omni.workers.engine.module import autocast, build_module, fill_module, on_gpu, resolve_dtypes
from verl_omni.workers.rollout.diffusers_rollout.engine import DiffusersRollout
from verl_omni.workers.rollout.server import RolloutServer


class DiffusersServer(RolloutServer):
    def load(self, device: torch.device) -> DiffusersRollout:
        common = self.actor_config.engine
        dtype, model_dtype = resolve_dtypes(common, device, lora=self.model_config.lora_rank > 0)
        adapter = DiffusionModelBase.get_class(self.model_config)
        attention, _ = attention_choice(common.attention_backend, adapter, device, dtype)
        module, parts = build_module(self.model_config, common.seed, model_dtype, attention)
        if on_gpu(common.use_torch_compile, device):
            if on_gpu(common.fused_gelu, device):
                for part in parts.values():
                    fuse_gelu(part)
            compile_blocks(parts)
        fill_module(module, self.model_config, device, model_dtype)
        module.eval()
        fp8 = None
        if "fp8" in (self.config.precision, self.config.pool.precision):
            fp8 = Fp8Layers(parts.values(), common.fp8_modules or adapter.fp8_modules, device, dtype)
        return DiffusersRollout(
            self.config,
            self.model_config,
            module,
            device,
            dtype,
            autocast=functools.partial(autocast, device, dtype),
            fp8=fp8,
            **self.config.engine_kwargs,
        )
