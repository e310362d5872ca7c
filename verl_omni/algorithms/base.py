"""What a loss is: pure mathematics, `compute_loss`, whose parameters name the tensors that it is fed.

A batch is flat: a row is one (sample, denoising step) pair or, in direct-preference training, one (sample, noise level)
pair. Micro-batches may be of any size and mix steps. So that they all add up to the same update, every loss is a mean
over rows of a value that depends on that row alone; it may average over a row's own elements, never across rows.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from verl_omni.config.knob import Range
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from tensordict import TensorDict
    from verl import DataProto

    from verl_omni.config import DiffusionActorConfig


# A tensor holds the log-probabilities of all its rows; a parameter is that of a row.
_PLURALS = {"log_prob": "log_probs", "old_log_prob": "old_log_probs"}


@dataclass
class DiffusionLossResult:
    """Output of a loss. Metrics are detached scalars: means over rows, but for names with ``max``, which are maxima."""

    loss: torch.Tensor
    metrics: dict[str, Any]
    add_loss_metric: bool = False


class MissingInputError(KeyError, ValueError):
    """A tensor that a loss needs is not there; a KeyError, which callers may wait for, that reads as one line."""

    __str__ = ValueError.__str__


class DiffusionLossFn(ABC):
    """A loss that the training engine calls on each micro-batch."""

    #: What the model's forward has to give, and what the batch has to hold. The trainer computes what is named here.
    required_model_output_keys: ClassVar[tuple[str, ...]] = ()
    required_data_keys: ClassVar[tuple[str, ...]] = ()
    #: Adjacent rows that belong together and must not be split between micro-batches: 2 for preference pairs.
    rows_per_unit: ClassVar[int] = 1
    #: Whether the samples of a prompt are noised alike and add up what `group_terms` gives. They share a mini-batch,
    #: and may lie in any micro-batch, on any rank.
    by_group: ClassVar[bool] = False
    #: Whether its formula is for steps whose log-probability is a Gaussian's: with another kind it is refused.
    gaussian_steps: ClassVar[bool] = False
    #: This loss's settings: fields of `actor.diffusion_loss`, and under "extra" those that it alone has. A loss that
    #: names none has Flow-GRPO's. A log-probability is a mean over thousands of latent elements, so ratios stay near 1,
    #: and so do their bounds.
    defaults: ClassVar[Mapping[str, Any]] = {
        "clip_ratio": 1e-4,
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "adv_clip_max": 5.0,
    }
    #: What the settings under "extra" may be, where not any finite number will do.
    extra_ranges: ClassVar[Mapping[str, Range]] = {}

    @classmethod
    @abstractmethod
    def compute_loss(cls, **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss, a mean over the given rows, and its metrics."""

    def __call__(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: "TensorDict"
    ) -> DiffusionLossResult:
        """Compute the loss of the tensors that `compute_loss` names: the batch's, or the model's own output."""
        outputs = {key: model_output[key] for key in self.required_model_output_keys}
        given = {**model_output, **data, **outputs, "config": config}
        keys = {name: _PLURALS.get(name, name) for name in self._parameters()}
        loss, metrics = self.compute_loss(**{name: given[key] for name, key in keys.items() if key in given})
        return DiffusionLossResult(loss=loss, metrics=metrics)

    @classmethod
    def _parameters(cls) -> list[str]:
        """What `compute_loss` may be given; where it takes ``**``, also what the loss that it extends may be."""
        names: list[str] = []
        for owner in cls.__mro__:
            if "compute_loss" in vars(owner):
                parameters = inspect.signature(owner.compute_loss).parameters.values()
                names += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
                if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                    break
        return list(dict.fromkeys(names))

    @staticmethod
    def prepare_actor_batch(batch: "DataProto", reward_tensor: torch.Tensor, config: Any) -> "DataProto":
        """Turn rollouts and their rewards into this loss's tensors, on the driver. ``config`` is the trainer's.

        Unchanged by default: the policy-gradient trainer has already added log-probabilities and advantages.
        """
        return batch

    def group_terms(
        self, *, config: "DiffusionActorConfig", model_output: Mapping[str, Any], data: "TensorDict"
    ) -> torch.Tensor:
        """With `by_group`: what each row adds to the sums of its group, (B, M).

        It is asked of all rows before an optimizer step, without a gradient; every row of that step then has its
        group's sums, (B, M), as ``group_sums``.
        """
        raise NotImplementedError

    @classmethod
    def data_keys(cls, config: "DiffusionActorConfig") -> tuple[str, ...]:
        """What the batch has to hold under this config: ``required_data_keys`` and what a setting asks for beside."""
        return cls.required_data_keys

    def validate_inputs(self, *, loss_name: str, model_output: Mapping[str, Any], data: "TensorDict") -> None:
        """Raise `MissingInputError` where an input is missing, and say which."""
        for needed, given, kind in (
            (self.required_model_output_keys, model_output, "model output"),
            (self.required_data_keys, data, "data"),
        ):
            missing = [key for key in needed if key not in given.keys()]
            if missing:
                raise MissingInputError(
                    f'loss "{loss_name}" needs {", ".join(missing)} in its {kind}, which holds: '
                    f"{', '.join(sorted(given.keys())) or 'nothing'}"
                )

    @classmethod
    def chained_steps(cls, config: "DiffusionActorConfig") -> int:
        """Through how many of the rollout's steps, one after another, `predicted_reward` is."""
        return 1

    @classmethod
    def check_extra(cls, extra: Mapping[str, Any], where: str) -> None:
        """Raise one line where a setting of this loss alone is of another type than its default, or out of range."""
        for name, value in extra.items():
            default = cls.defaults.get("extra", {}).get(name)
            if isinstance(default, int | float) and not isinstance(value, int | float):
                raise ValueError(f"{where}.{name}={value}: expected a number, such as {default}")
            cls.extra_ranges.get(name, Range()).check(f"{where}.{name}", value)

    @classmethod
    def settings(cls, config: "DiffusionActorConfig") -> SimpleNamespace:
        """This loss's settings: what the config sets, else the defaults."""
        given = config.diffusion_loss
        fields = {name: default for name, default in cls.defaults.items() if name != "extra"}
        for name in fields:
            value = getattr(given, name, None)
            fields[name] = fields[name] if value is None else value
        extra = merge_extra(cls.__name__, cls.defaults.get("extra", {}), getattr(given, "extra", None) or {})
        return SimpleNamespace(**fields, **extra)


def merge_extra(owner: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one algorithm, where ``given`` overrides; one that it does not know is an error."""
    for name in given:
        if name not in known:
            raise ValueError(unknown(f"diffusion_loss.extra setting of {owner}", name, known))
    return {**known, **given}


def row_mean(values: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over all but the first dimension: (B,).

    `weights` (N,) or (B, N), of mean 1, say how much each of the N entries of the first of these dimensions counts.
    """
    if weights is not None:
        values = values.flatten(2).mean(dim=2) * weights.to(values.device)
    return values.flatten(1).mean(dim=1)


def per_part(value: torch.Tensor | float, rows: int) -> torch.Tensor:
    """(B, 1) from a scalar, (B,) or (B, 1, ..., 1); (B, N) from that or (B, N, 1, ..., 1), where each of the N entries
    of a row's first dimension has its own."""
    value = torch.as_tensor(value)
    return value.reshape(1, 1).expand(rows, 1) if value.numel() == 1 else value.reshape(rows, -1)


def per_row(value: torch.Tensor | float, rows: int) -> torch.Tensor:
    """A number per row, (B,), of the same: the mean where there are several."""
    return per_part(value, rows).mean(dim=1)


def divergence(
    difference: torch.Tensor, std: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """``mean(Δ²/(2·std²))`` of each row, (B,), with a std (B, 1), or (B, N) where parts of a row have their own."""
    if std.shape[1] == 1:
        return row_mean(difference**2, weights) / (2 * std[:, 0] ** 2)
    return row_mean(difference**2 / (2 * column(std, difference) ** 2), weights)


def column(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(B,) as (B, 1, ..., 1), (B, N) as (B, N, 1, ..., 1), to be broadcast against ``like``."""
    return value.reshape(*value.shape, *[1] * (like.ndim - value.ndim))


def weighted_mean(rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Mean over rows. Weights (detached; 0 for a rejected sample) scale a row and leave the divisor as it is."""
    return rows.mean() if weights is None else (rows * weights.detach()).mean()


def check_rows(**tensors: torch.Tensor | None) -> None:
    """Raise where tensors that go row by row differ in shape, which broadcasting would hide."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"one value per (sample, step) pair is expected in each of: {listed}")
