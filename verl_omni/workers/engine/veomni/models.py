"""VeOmni's forward passes for the transformers of diffusers, which share a sample's tokens among ranks.

VeOmni's own classes are transformers models around those of diffusers, and patch these for the whole process. Here a
part stays what it is, with its names, its config and its LoRA, and computes with VeOmni's functions.
"""

from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from veomni.distributed.parallel_state import get_parallel_state
from veomni.distributed.sequence_parallel import gather_heads_scatter_seq, gather_seq_scatter_heads

SHARED_ATTENTION = "verl_omni_shared"


def compute_with_veomni(part: torch.nn.Module) -> None:
    """One of `veomni_impl.TRANSFORMERS`, from now on with VeOmni's forward and VeOmni's attention."""
    {"QwenImageTransformer2DModel": _qwen_image, "WanTransformer3DModel": _wan}[type(part).__name__](part)


def _qwen_image(part: torch.nn.Module) -> None:
    from veomni.models.diffusers.qwen_image.qwen_image_transformer import modeling_qwen_image_transformer as veomni

    _become(part, veomni.QwenImageTransformer2DModel_forward)
    for block in part.transformer_blocks:
        _process(block.attn, veomni.QwenImageSPAttnProcessor())


def _wan(part: torch.nn.Module) -> None:
    from veomni.models.diffusers.wan_t2v.wan_transformer import modeling_wan_transformer as veomni

    def forward(self: torch.nn.Module, *args: Any, return_dict: bool = True, **inputs: Any) -> Any:
        """VeOmni's returns a tensor: its first row would be taken for the prediction."""
        sample = veomni.WanTransformer3DModel_forward(self, *args, **inputs)
        return Transformer2DModelOutput(sample=sample) if return_dict else (sample,)

    _become(part, forward)
    ALL_ATTENTION_FUNCTIONS.register(SHARED_ATTENTION, shared_attention)
    for block in part.blocks:
        _process(block.attn1, veomni.WanSPAttnProcessor(SHARED_ATTENTION))
        _process(block.attn2, veomni.WanSPAttnProcessor(SHARED_ATTENTION))


def _become(part: torch.nn.Module, forward: Callable) -> None:
    """An object of a class of its own, which is called as before: that name is written into exported configs."""
    kind = type(part)
    part.__class__ = type(kind.__name__, (kind,), {"forward": forward, "to_empty": _stay, "__module__": __name__})


def _stay(part: torch.nn.Module, *, device: Any, recurse: bool = True) -> torch.nn.Module:
    """VeOmni would give all parameters memory now: an adapter's first values would be gone. They are filled later."""
    return part


def _process(attention: torch.nn.Module, processor: Any) -> None:
    processor._attention_backend = attention.processor._attention_backend
    attention.set_processor(processor)


def shared_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    skip_ulysses: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """(rows, heads, tokens, size) with diffusers' kernels: VeOmni's own is flash attention, for bfloat16 on a GPU."""
    state = get_parallel_state()
    shared = state.ulysses_enabled and not skip_ulysses
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    if shared:
        query, key, value = (
            gather_seq_scatter_heads(x, seq_dim=1, head_dim=2, group=state.ulysses_group) for x in (query, key, value)
        )
    backend = module._attn.processor._attention_backend
    output = dispatch_attention_fn(query, key, value, attn_mask=attention_mask, backend=backend)
    if shared:
        output = gather_heads_scatter_seq(output, seq_dim=1, head_dim=2, group=state.ulysses_group)
    return output, None
