"""Checkpoints with names of their own: find the file, read its tensors, put all of them into a model."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.rewards.torch_models import cannot_load, first_sentence, some
from verl_omni.utils.errors import RunError
from verl_omni.utils.hub import file_of

if TYPE_CHECKING:
    import torch


def find_file(source: str, name: str) -> Path:
    """`reward.scorers.<name>.model`: a file, or `<owner>/<repository>/<file>` on the hub, which is downloaded once."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    try:
        return file_of(source)
    except (OSError, ValueError) as error:
        raise RunError(cannot_load(name, "model", source, error, "the file")) from error


def read_tensors(path: Path, name: str) -> dict[str, "torch.Tensor"]:
    """The tensors of a checkpoint by name. A file that holds anything to run is refused."""
    import torch
    from safetensors.torch import load_file

    where = f'reward.scorers.{name}.model: "{path}"'
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is something else can make torch raise anything
        raise RunError(f"{where} is not a checkpoint of tensors alone: {first_sentence(error)}") from error
    found = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise RunError(f"{where} is not a checkpoint of tensors by name")
    return dict(found)


def build_model(
    cls: Any,
    config: Any,
    weights: Mapping[str, "torch.Tensor"],
    published: Callable[[str], str],
    where: str,
    dtype: "torch.dtype",
    part: Callable[[str, "torch.Tensor"], "torch.Tensor"] = lambda name, tensor: tensor,
    **options: Any,
) -> Any:
    """A transformers model with all of these weights and no others, which were published under names of their own.

    `published` says what that of a parameter is; `part` takes the parameter out of the tensor with that name.
    """
    import torch

    with torch.device("meta"):
        expected = cls(config, **options).state_dict()
    names = {name: published(name) for name in expected}
    check_names(names.values(), weights, where)
    parts = {name: part(name, weights[key]) for name, key in names.items()}
    other = sorted({names[name] for name in expected if expected[name].shape != parts[name].shape})
    if other:
        raise RunError(f"{where} is another model: of another shape is {some(other)}")
    model, info = cls.from_pretrained(
        None, config=config, state_dict=parts, dtype=dtype, output_loading_info=True, **options
    )
    strange = sorted(info["missing_keys"] | info["unexpected_keys"])
    if strange:
        raise RunError(f"{where}: this version of transformers does not take {some(strange)}")
    return model.requires_grad_(False)


def linear_head(weights: Mapping[str, "torch.Tensor"], where: str, prefix: str = "layers.") -> "torch.nn.Sequential":
    """The head of LAION's aesthetic predictor, which ImageReward has too: five linear layers with no activation.

    They are called 0, 2, 4, 6 and 7: the numbers between are dropout, which scoring has not.
    """
    from torch import nn

    numbers = (0, 2, 4, 6, 7)
    check_names([f"{prefix}{n}.{kind}" for n in numbers for kind in ("weight", "bias")], weights, where)
    head = nn.Sequential(*(nn.Identity() for _ in range(8)))
    for number in numbers:
        outputs, inputs = weights[f"{prefix}{number}.weight"].shape
        head[number] = nn.Linear(inputs, outputs)
    head.load_state_dict({key.removeprefix(prefix): value for key, value in weights.items()})
    return head.eval().requires_grad_(False)


def check_names(expected: Iterable[str], found: Iterable[str], where: str) -> None:
    """A checkpoint has exactly the tensors that a model expects, or one line names those that differ."""
    expected, found = set(expected), set(found)
    lacks, extra = sorted(expected - found), sorted(found - expected)
    told = [f"it lacks {some(lacks)}"] * bool(lacks) + [f"it has {some(extra)}"] * bool(extra)
    if told:
        raise RunError(f"{where} is another model: {' and '.join(told)}")


def shape_of(weights: Mapping[str, "torch.Tensor"], key: str, where: str) -> "torch.Size":
    """Of a tensor that has to be there."""
    if key not in weights:
        raise RunError(f"{where} is another model: it lacks {key}")
    return weights[key].shape


def depth_of(weights: Iterable[str], prefix: str) -> int:
    """How many layers are called `<prefix><number>.`"""
    return len({key.removeprefix(prefix).split(".")[0] for key in weights if key.startswith(prefix)})
