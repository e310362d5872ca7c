"""The parameters of a model, as the ranks that share them hold them."""

import dataclasses
import functools
import math
from collections import Counter
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

    def gathered(self, itemsize: int) -> int:
        """Bytes where ranks gather numbers of so many: what is held in 8 bits stays so."""
        return self.numel * (1 if self.itemsize == 1 else itemsize)

    def share(self, parts: int) -> int:
        """Bytes on the first of so many ranks: FSDP2 cuts the first dimension, and rounds up."""
        return math.ceil(self.shape[0] / parts) * math.prod(self.shape[1:]) * self.itemsize if self.shape else 4


@dataclass(frozen=True)
class Weights:
    tensors: tuple[Held, ...]
    adapted: int  # bytes of the frozen weights that LoRA adapts

    def rows(self) -> list:
        """To be written down."""
        return [self.adapted, [[held.shape, held.itemsize, held.trained, held.block] for held in self.tensors]]

    @classmethod
    def of_rows(cls, rows: list) -> "Weights":
        adapted, tensors = rows
        return cls(tuple(Held(tuple(shape), *others) for shape, *others in tensors), adapted)

    @functools.cached_property
    def _alike(self) -> Counter[Held]:
        """How many there are of each kind: blocks are many, and alike."""
        return Counter(dataclasses.replace(held, block=None) for held in self.tensors)

    @functools.cache  # noqa: B019
    def _in_blocks(self, itemsize: int) -> dict[int | None, tuple[int, int]]:
        """Bytes of each block and around them, gathered in numbers of so many; and how many of those are trained."""
        found: dict[int | None, tuple[int, int]] = {None: (0, 0)}
        for held in self.tensors:
            all_of_it, trained = found.get(held.block, (0, 0))
            size = held.gathered(itemsize)
            found[held.block] = all_of_it + size, trained + size * held.trained
        return found

    def gathered(self, itemsize: int) -> int:
        """Bytes of the whole model, gathered so."""
        return sum(held.gathered(itemsize) * count for held, count in self._alike.items())

    @property
    def numel(self) -> int:
        return sum(held.numel * count for held, count in self._alike.items())

    @property
    def trained(self) -> int:
        """Numbers that are trained."""
        return sum(held.numel * count for held, count in self._alike.items() if held.trained)

    def bytes(self, parts: int = 1, which: Callable[[Held], bool] = lambda held: True) -> int:
        """Of those, a rank's share."""
        return sum(held.share(parts) * count for held, count in self._alike.items() if which(held))

    def trained_bytes(self, parts: int = 1) -> int:
        return self.bytes(parts, lambda held: held.trained)

    def largest_block(self, itemsize: int, trained: bool = False) -> int:
        """Bytes of the largest block, gathered in numbers of so many bytes; of it what is trained."""
        blocks = (sizes[trained] for block, sizes in self._in_blocks(itemsize).items() if block is not None)
        return max(blocks, default=0)

    def around(self, itemsize: int) -> int:
        """Bytes of what is around the blocks, gathered."""
        return self._in_blocks(itemsize)[None][0]

    @property
    def blocks(self) -> int:
        return len(self._in_blocks(1)) - 1

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor, whole."""
        return max(held.numel * held.itemsize for held in self._alike)


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
