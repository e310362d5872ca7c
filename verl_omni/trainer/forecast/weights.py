"""The parameters of a model, as the ranks that share them hold them."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.engine.lora import lora_layers


@dataclass(frozen=True)
class Held:
    shape: tuple[int, ...]
    itemsize: int
    trained: bool
    block: int | None  # None: around the blocks

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def share(self, parts: int) -> int:
        """Bytes on the first of so many ranks: FSDP2 cuts the first dimension, and rounds up."""
        return math.ceil(self.shape[0] / parts) * math.prod(self.shape[1:]) * self.itemsize if self.shape else 4


@dataclass(frozen=True)
class Weights:
    tensors: tuple[Held, ...]
    adapted: int  # bytes of the frozen weights that LoRA adapts

    @property
    def numel(self) -> int:
        return sum(held.numel for held in self.tensors)

    @property
    def trained(self) -> int:
        """Numbers that are trained."""
        return sum(held.numel for held in self.tensors if held.trained)

    def bytes(self, parts: int = 1, which: Callable[[Held], bool] = lambda held: True) -> int:
        """Of those, a rank's share."""
        return sum(held.share(parts) for held in self.tensors if which(held))

    def trained_bytes(self, parts: int = 1) -> int:
        return self.bytes(parts, lambda held: held.trained)

    def largest_block(self, itemsize: int, trained: bool = False) -> int:
        """Bytes of the largest block, gathered in numbers of so many bytes; of it what is trained."""
        blocks: dict[int, int] = {}
        for held in self.tensors:
            if held.block is not None and (held.trained or not trained):
                blocks[held.block] = blocks.get(held.block, 0) + held.numel * itemsize
        return max(blocks.values(), default=0)

    def around(self, itemsize: int) -> int:
        """Bytes of what is around the blocks, gathered."""
        return sum(held.numel * itemsize for held in self.tensors if held.block is None)

    @property
    def blocks(self) -> int:
        return len({held.block for held in self.tensors} - {None})

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor, whole."""
        return max(held.numel * held.itemsize for held in self.tensors)


def weights_of(parts: Iterable[torch.nn.Module]) -> Weights:
    """Of modules as the training engine builds them, before anything is read."""
    parts = list(parts)
    blocks = [block for part in parts for block in repeated_blocks(part)]
    place = {id(p): number for number, block in enumerate(blocks) for p in block.parameters()}
    found = [
        Held(tuple(p.shape), p.element_size(), p.requires_grad, place.get(id(p)))
        for part in parts
        for p in part.parameters()
    ]
    adapted = sum(layer.get_base_layer().weight.nbytes for layer in lora_layers(parts))
    return Weights(tuple(found), adapted)
