"""LoRA: adapters on the trained modules, and their product folded into the weights for passes without a gradient."""

import contextlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase


def add_lora(
    parts: dict[str, torch.nn.Module],
    model_config: DiffusionModelConfig,
    adapter: type[DiffusionModelBase],
    empty: bool = False,
) -> None:
    """Freeze the modules and give each its adapters, which are trained in float32 whatever the frozen dtype is.

    `empty`: without values, on the meta device.
    """
    from diffusers.models.modeling_utils import no_init_weights
    from peft import LoraConfig

    targets = model_config.target_modules or adapter.lora_target_modules
    config = LoraConfig(
        r=model_config.lora_rank,
        lora_alpha=model_config.lora_alpha,
        init_lora_weights=model_config.lora_init if model_config.lora_init != "default" else True,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    for part in parts.values():
        part.requires_grad_(False)
        with contextlib.ExitStack() as values:
            for context in (no_init_weights(), torch.device("meta")) if empty else (stand_ins(part),):
                values.enter_context(context)
            part.add_adapter(config)
        for parameter in part.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        for layer in lora_layers([part]):
            layer.cast_input_dtype_enabled = False  # autocast and FSDP choose the dtype of the computation


@contextmanager
def stand_ins(part: torch.nn.Module) -> Iterator[None]:
    """peft takes a new adapter to where its layer's weight is, in that one's dtype. A weight that is nowhere yet is
    represented by a single number on the CPU, so that the adapter keeps the values that it drew."""
    empty = [(m, m.weight) for m in part.modules() if "weight" in m._parameters and m.weight is not None]
    empty = [(module, weight) for module, weight in empty if weight.is_meta]
    for module, weight in empty:
        number = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        module._parameters["weight"] = torch.nn.Parameter(number, requires_grad=False)
    try:
        yield
    finally:
        for module, weight in empty:
            module._parameters["weight"] = weight


def check_same_lora(peft_config: dict[str, Any] | None, model_config: DiffusionModelConfig) -> None:
    """An adapter that was trained with another alpha would be added in another measure, without a word."""
    if peft_config is None:
        return
    sent, own = (peft_config["r"], peft_config["lora_alpha"]), (model_config.lora_rank, model_config.lora_alpha)
    if sent != own:
        raise ValueError(
            f"the weights are a LoRA of rank {sent[0]} with alpha {sent[1]}, and the rollout's model has rank {own[0]} "
            f"with alpha {own[1]}: give both the same actor_rollout_ref.model.lora_rank and lora_alpha"
        )


def base_name(name: str) -> str:
    """Of a frozen weight, as it is called without an adapter beside it."""
    return name.replace(".base_layer.", ".")


def lora_layers(parts: Iterable[torch.nn.Module]) -> list[torch.nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [m for part in parts for m in part.modules() if isinstance(m, LoraLayer)]


LOOKED_AT = 2**17  # weights of a layer


def folded(frozen: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """`frozen` + `product` (float32, written over) in the dtype of `frozen`, where as much arrives as was added.

    bfloat16 has 8 bits: rounded to the nearest, most of what a young adapter adds is less than half of the last one,
    and lost. So it is added with a gain, the one with which the change that is left, projected on what was meant, is
    the whole of it. Few weights then change, by more than was meant, and others not at all; the gain falls to 1 as the
    adapter grows. Nothing is drawn: the same adapter always gives the same weights.
    """
    if frozen.dtype != torch.float32:
        product.mul_(_gain(frozen, product))
    return (frozen + product).to(frozen.dtype)


def _gain(frozen: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """From a part of the layer's weights; nothing here waits for the device."""
    every = max(1, frozen.numel() // LOOKED_AT) | 1  # odd: not one column of a matrix again and again
    some, added = frozen.flatten()[::every].float(), product.flatten()[::every]
    octaves = torch.arange(21, device=frozen.device) / 2  # gains of 1 to 1024
    rounded = (some + octaves.exp2()[:, None] * added).to(frozen.dtype).float()
    arrives = (rounded - some) @ added / (added @ added)  # with each gain: it never falls
    level = arrives.clamp_min(1e-6).log2()
    below = (-level[:-1] / level.diff().clamp_min(1e-6)).clamp(0, 1)  # how much of each half octave is below 1
    return (below.nan_to_num(0.0).sum() / 2).exp2()  # where nothing is added, NaN: it stays nothing


class FoldedLora:
    """A second copy of the adapted weights with W + scaling * B A in it, swapped in for a rollout.

    The frozen weights themselves are never written: adding and subtracting in bfloat16 would wear them down. The copy
    exists during a rollout only, so that an update has its memory.
    """

    def __init__(self, parts: Iterable[torch.nn.Module]):
        self.parts = list(parts)
        self.layers = lora_layers(self.parts)
        self.frozen = [layer.get_base_layer().weight.data for layer in self.layers]

    @staticmethod
    def bytes_needed(parts: Iterable[torch.nn.Module]) -> int:
        return sum(layer.get_base_layer().weight.nbytes for layer in lora_layers(parts))

    @torch.no_grad()
    def swap_in(self, but: Collection[torch.nn.Module] = ()) -> None:
        """`but`: base layers that have their sum in another form."""
        for layer, frozen in zip(self.layers, self.frozen, strict=True):
            if layer.get_base_layer() in but:
                continue
            layer.get_base_layer().weight.data = folded(frozen, layer.get_delta_weight("default").float())
        for part in self.parts:
            part.disable_adapters()

    def swap_out(self) -> None:
        for layer, frozen in zip(self.layers, self.frozen, strict=True):
            layer.get_base_layer().weight.data = frozen
        for part in self.parts:
            part.enable_adapters()


class GatheredLora:
    """The same where ranks share the weights: what they gather for a rollout is a copy, and is forgotten after it."""

    def __init__(self, parts: Iterable[torch.nn.Module]):
        self.layers = lora_layers(parts)

    @torch.no_grad()
    def swap_in(self, but: Collection[torch.nn.Module] = ()) -> None:
        for layer in self.layers:
            if layer.get_base_layer() not in but:
                weight = layer.get_base_layer().weight.data
                weight.copy_(folded(weight, layer.get_delta_weight("default").float()))
            layer._disable_adapters = True  # peft's own switch tells FSDP that they are not trained

    def swap_out(self) -> None:
        for layer in self.layers:
            layer._disable_adapters = False
