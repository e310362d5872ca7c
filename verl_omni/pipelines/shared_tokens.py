"""How ranks share the tokens of a sample in the forward of a transformer."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TokenPlan:
    """`cuts`: where diffusers' context parallelism cuts tensors and joins them again, in the form of its `_cp_plan`.

    Attentions by the last part of their names, or all: in those of `exchange` tokens are exchanged for heads, to those
    of `gather` each rank gives all tokens to attend to. `whole`: which of the transformer's outputs every rank computes
    as a whole.
    """

    cuts: dict[str, Any]
    exchange: tuple[str, ...] | None = None
    gather: tuple[str, ...] = ()
    whole: tuple[int, ...] = ()

    def exchanging(self, part: torch.nn.Module) -> list[torch.nn.Module]:
        return attentions(part, self.exchange)

    def gathering(self, part: torch.nn.Module) -> list[torch.nn.Module]:
        return attentions(part, self.gather)


def attentions(part: torch.nn.Module, names: tuple[str, ...] | None) -> list[torch.nn.Module]:
    return [
        module
        for name, module in part.named_modules()
        if hasattr(getattr(module, "processor", None), "_parallel_config")
        and (names is None or name.rpartition(".")[2] in names)
    ]
