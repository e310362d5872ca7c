"""A LoRA of a folder in the place of the trained one.

What it lacks is zeros: the rows of A and the columns of B beyond its rank, and all of a module that it leaves alone.
The product B A is then its own, and that of a module without one is none.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.workers.engine.export import read_lora

Reader = tuple[Mapping[str, tuple[int, ...]], Callable[[str], torch.Tensor]]  # shapes, and what reads one
MERGE = "merge it into its base, verl-omni export RUN OUT --format merged, and give that model"
RANK = {"lora_A": 0, "lora_B": 1}  # the dimension of each that is the rank, of linear layers and of convolutions


def reader(
    model: DiffusionModelConfig, folder: Path, parts: Mapping[str, torch.nn.Module], part: str, setting: str
) -> Reader:
    """Of the folder's LoRA as the trained one would have it."""
    state, told = read_lora(model, str(folder), parts, part)
    if not state:
        raise ValueError(f"{setting}={folder} holds no LoRA weights for {part}: expected diffusers' format")
    trained = {
        name.replace(".default.", "."): tuple(parameter.shape)
        for name, parameter in parts[part].named_parameters()
        if parameter.requires_grad
    }
    shapes, found = {name: tuple(value.shape) for name, value in state.items()}, {}
    for name, whole in trained.items():
        module, kind = _place(name)
        if not any(f"{module}.{other}.weight" in shapes for other in RANK):
            found[name] = whole
            continue
        ranks = [shapes.get(f"{module}.{other}.weight", ())[axis : axis + 1] for other, axis in RANK.items()]
        if ranks[0] != ranks[1]:
            raise ValueError(f"{setting}={folder} has an A and a B for {part}.{module} that do not belong together")
        (rank,) = ranks[0]
        if rank > model.lora_rank:
            raise ValueError(
                f"{setting}={folder} has rank {rank} for {part}.{module}, and the trained LoRA rank {model.lora_rank}: "
                f"a smaller one is taken as it is; of a larger one {MERGE}"
            )
        if _but(shapes[name], RANK[kind]) == _but(whole, RANK[kind]):
            found[name] = whole
    alphas = _alphas(told, shapes, f"{setting}={folder}")

    def read(name: str) -> torch.Tensor:
        module, kind = _place(name)
        if name not in state:
            return torch.zeros(trained[name])
        value = state[name]
        if kind == "lora_B":  # peft multiplies B A with alpha / rank: here with the trained one's
            value = value * (alphas[module] * model.lora_rank / (value.shape[1] * model.lora_alpha))
        return _filled_up(value, trained[name])

    return shapes | found, read


def _filled_up(value: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(value.shape) == shape:
        return value
    whole = value.new_zeros(shape)
    whole[tuple(map(slice, value.shape))] = value
    return whole


def _place(name: str) -> tuple[str, str]:
    """(module, lora_A or lora_B)."""
    module, kind, _ = name.rsplit(".", 2)
    return module, kind


def _but(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _alphas(told: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, float]:
    """Of each module as diffusers has them when it loads the file: of one that tells nothing, its rank."""
    ranks = {_place(name)[0]: shape[0] for name, shape in shapes.items() if name.endswith(".lora_A.weight")}
    for name in ("use_rslora", "use_dora", "alpha_pattern"):
        if told.get(name):
            raise ValueError(f"{where} was trained with peft's {name}={told[name]}, which is not known here: {MERGE}")
    if not told and len(set(ranks.values())) > 1:
        raise ValueError(f"{where} has ranks {sorted(set(ranks.values()))} and does not tell its alpha: {MERGE}")
    return {module: told.get("lora_alpha", rank) for module, rank in ranks.items()}
