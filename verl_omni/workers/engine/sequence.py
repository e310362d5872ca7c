"""Sequence parallelism: the ranks beside each other share a sample's tokens, and exchange heads for attention.

That is diffusers' own context parallelism, Ulysses' way. Ring attention is left out: its gradients are wrong before
diffusers 0.40 (huggingface/diffusers#14274).
"""

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel, remove_context_parallel
from torch.distributed.device_mesh import DeviceMesh

from verl_omni.pipelines.shared_tokens import TokenPlan
from verl_omni.workers.layout import Layout


class SharedSequence:
    """The transformers' forward on shares of the tokens. All ranks of a group put the same in, and get the same out.

    Each rank's gradient is that of its own tokens: the group's sum is the gradient of the sample.
    """

    def __init__(self, plans: Mapping[torch.nn.Module, TokenPlan], layout: Layout, device: torch.device):
        self.plans, self.ranks = plans, layout.sequence
        mesh = layout.attention(device.type)
        # Not the mesh's: where all ranks share a sample that is the group of all, and a forward that fails leaves it.
        self.group = layout.group("sequence")
        own = DeviceMesh.from_group(self.group, device.type, mesh_dim_names=("ulysses",))
        for part, plan in plans.items():
            # As `part.enable_parallelism` has it, which in newer versions asks for an accelerator.
            part._parallel_config = ParallelConfig(ContextParallelConfig(ulysses_degree=self.ranks, mesh=mesh))
            part._parallel_config.setup(dist.get_rank(), dist.get_world_size(), device, mesh=mesh)
            config = part._parallel_config.context_parallel_config
            config._ulysses_mesh = config._flattened_mesh = own
            part.register_forward_pre_hook(self._make_even, with_kwargs=True)
            part.register_forward_hook(functools.partial(self._share_gradients, plan))
            for attention in plan.exchanging(part):
                attention.register_forward_pre_hook(self._order_mask, with_kwargs=True)
            for attention in plan.gathering(part):
                attention.register_forward_pre_hook(self._gather_keys, with_kwargs=True)
        self.go_on()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, every rank computes whole samples of its own."""
        self.pause()
        try:
            yield
        finally:
            self.go_on()

    def pause(self) -> None:
        self.on = False
        for part, plan in self.plans.items():
            remove_context_parallel(part, plan.cuts)
            self._configure(part, None)

    def go_on(self) -> None:
        self.on = True
        for part, plan in self.plans.items():
            apply_context_parallel(part, part._parallel_config.context_parallel_config, plan.cuts)
            self._configure(part, part._parallel_config)

    def _configure(self, part: torch.nn.Module, config: Any) -> None:
        for attention in self.plans[part].exchanging(part):
            attention.processor._parallel_config = config

    def _share_gradients(self, plan: TokenPlan, part: torch.nn.Module, args: Any, outputs: Any) -> None:
        """What every rank computes as a whole has its gradient on every rank, and gradients are summed."""
        for index in plan.whole if self.on else ():
            if outputs[index].requires_grad:
                outputs[index].register_hook(lambda gradient: gradient / self.ranks)

    def _gather_keys(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """All tokens to attend to, and their positions, where there is no exchange."""
        if not self.on:
            return args, kwargs
        positions = tuple(_Joined.apply(one, one.ndim - 2, self.group) for one in kwargs["key_rotary_emb"])
        tokens = _Joined.apply(kwargs["encoder_hidden_states"], 1, self.group)
        return args, kwargs | {"encoder_hidden_states": tokens, "key_rotary_emb": positions}

    def _make_even(self, part: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Shares are equal. A prompt has any number of tokens: what is added, nobody attends to."""
        if not self.on:
            return args, kwargs
        self._check(part, kwargs["hidden_states"])
        cuts = self.plans[part].cuts
        for name, split in cuts.get("", {}).items():
            # FLUX.2 takes ids (tokens, axes) and (rows, tokens, axes), its plan the latter alone.
            if split.expected_dims == 3 and name in kwargs and kwargs[name].dim() == 2:
                kwargs = kwargs | {name: kwargs[name][None]}
        text = kwargs["encoder_hidden_states"]
        missing = -text.shape[1] % self.ranks
        if not missing or not any("encoder_hidden_states" in splits for splits in cuts.values()):
            return args, kwargs
        if "encoder_hidden_states_mask" not in kwargs:
            raise ValueError(
                f"prompts of {text.shape[1]} tokens cannot be shared equally by {self.ranks} ranks: set "
                f"actor_rollout_ref.rollout.pipeline.max_sequence_length to a multiple of {self.ranks}"
            )
        mask = kwargs["encoder_hidden_states_mask"]
        if mask is None:
            mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        padded = {"encoder_hidden_states": F.pad(text, (0, 0, 0, missing))}
        return args, kwargs | padded | {"encoder_hidden_states_mask": F.pad(mask, (0, missing))}

    def _check(self, part: torch.nn.Module, latents: torch.Tensor) -> None:
        patches = math.prod(part.config.patch_size) if latents.dim() == 5 else 1
        tokens = math.prod(latents.shape[2:]) // patches if latents.dim() == 5 else latents.shape[1]
        if tokens % self.ranks:
            raise ValueError(
                f"a sample of {tokens} tokens cannot be shared equally by {self.ranks} ranks "
                "(actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size): choose another height, width or "
                "number of frames"
            )

    def _order_mask(self, attention: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The mask has all of the text before the image; tokens come rank by rank, each with its text and its image."""
        mask = kwargs.get("attention_mask")
        if not self.on or mask is None:
            return args, kwargs
        text = kwargs["encoder_hidden_states"].shape[1] * self.ranks
        shares = zip(mask[..., :text].chunk(self.ranks, -1), mask[..., text:].chunk(self.ranks, -1), strict=True)
        return args, kwargs | {"attention_mask": torch.cat([piece for share in shares for piece in share], dim=-1)}


class _Joined(torch.autograd.Function):
    """The ranks' tokens, one after the other. Each rank's gradient of all of them is a part of the sum."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group, own = dim, group, own.contiguous()
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, own, group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None
