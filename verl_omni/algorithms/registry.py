"""Algorithms by name. Open: what a user's `external_lib` registers works wherever a built-in name does.

An algorithm is a loss, an advantage estimator and settings. One that has all three says so with
`register_algorithm(Algorithm(...))`; one that only brings a loss, an estimator or a model adapter registers just that,
and the rest is Flow-GRPO's.
"""

import dataclasses
import importlib
import inspect
import pkgutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

import torch

from verl_omni.algorithms.base import DiffusionLossFn, merge_extra
from verl_omni.utils.registry import Registry
from verl_omni.utils.suggest import YOUR_OWN, unknown

C = TypeVar("C")
AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]

# How a family samples where neither the user nor the algorithm says so.
ROLLOUT_DEFAULTS: dict[str, dict[str, Any]] = {
    "policy_gradient": {"sde_type": "sde", "noise_level": 0.7},
    "direct_preference": {"sde_type": "ode", "noise_level": 0.0},
}


@dataclass(frozen=True)
class Algorithm:
    """What `actor_rollout_ref.model.algorithm=<name>` selects. The trainer reads this and asks for no name."""

    name: str
    loss: str = "flow_grpo"
    adv_estimator: str = "flow_grpo"
    trainer_type: str = "policy_gradient"
    #: defaults for fields of `rollout.algo`, `actor.diffusion_loss` and `algorithm` that the user leaves null
    rollout: Mapping[str, Any] = field(default_factory=dict)
    loss_defaults: Mapping[str, Any] = field(default_factory=dict)
    algorithm: Mapping[str, Any] = field(default_factory=dict)
    #: whose (architecture, algorithm) model adapters serve it where it has none of its own
    adapter: str | None = "flow_grpo"
    supports_cfg: bool = True
    #: the policy that samples: "current", or "old", a slowly following copy
    rollout_policy: str = "current"
    description: str = ""

    def __post_init__(self) -> None:
        if self.trainer_type not in ROLLOUT_DEFAULTS:
            raise ValueError(unknown(f'trainer_type of algorithm "{self.name}"', self.trainer_type, ROLLOUT_DEFAULTS))
        if self.rollout_policy not in ("current", "old"):
            raise ValueError(
                f'rollout_policy of algorithm "{self.name}" is "current" or "old", not "{self.rollout_policy}"'
            )


_load_lock = threading.RLock()
_loaded = False


def _load_builtins() -> None:
    """Import each file of this package once, so that it registers what it holds."""
    global _loaded
    with _load_lock:
        if _loaded:
            return
        _loaded = True  # set first: the files look names up while they load
        package = importlib.import_module("verl_omni.algorithms")
        try:
            for module in pkgutil.iter_modules(package.__path__):
                importlib.import_module(f"verl_omni.algorithms.{module.name}")
        except BaseException:
            _loaded = False
            raise


_LOSSES: Registry[type[DiffusionLossFn]] = Registry("diffusion loss", _load_builtins)
_ESTIMATORS: Registry[AdvantageFn] = Registry("advantage estimator", _load_builtins)
_ALGORITHMS: Registry[Algorithm] = Registry("algorithm", _load_builtins)
_ADAPTED: set[str] = set()  # algorithms that a model adapter is registered for


class DiffusionAdvantageEstimator(str, Enum):
    """Names of the built-in estimators. Any other registered name is as good: `DiffusionAdvantageEstimator("mine")`."""

    FLOW_GRPO = "flow_grpo"
    GDPO = "gdpo"

    @classmethod
    def _missing_(cls, value: object) -> "DiffusionAdvantageEstimator":
        get_diffusion_adv_estimator_fn(value)  # raises, with the known names
        member = str.__new__(cls, value)
        member._name_, member._value_ = value.upper(), value
        return member


def register_diffusion_loss(name: str) -> Callable[[type[DiffusionLossFn]], type[DiffusionLossFn]]:
    """Class decorator: this loss is `actor_rollout_ref.actor.diffusion_loss.loss_mode=<name>`."""

    def wrap(cls: type[DiffusionLossFn]) -> type[DiffusionLossFn]:
        _LOSSES.add(name, cls)
        return cls

    return wrap


def register_diffusion_adv_est(
    name_or_enum: str | DiffusionAdvantageEstimator, *, rewards: str | None = None
) -> Callable[[AdvantageFn], AdvantageFn]:
    """Decorator: this function is `algorithm.adv_estimator=<name>`.

    `rewards` is `one` where it reads the sum alone, and `several` where it is nothing without the weights of each. What
    is not said is taken from its signature.
    """

    def wrap(fn: AdvantageFn) -> AdvantageFn:
        _ESTIMATORS.add(_plain(name_or_enum), fn)
        if rewards is not None:
            fn.rewards = rewards
        return fn

    return wrap


def register_algorithm(algorithm: Algorithm) -> Algorithm:
    """Make an algorithm known under its name."""
    _ALGORITHMS.add(algorithm.name, algorithm)
    return algorithm


def name_algorithm(name: str) -> None:
    """A model adapter is registered for an algorithm of that name: it exists, if only by that adapter."""
    _ADAPTED.add(name)


def algorithm_names() -> list[str]:
    """Every name that `actor_rollout_ref.model.algorithm` accepts."""
    return sorted({*_ALGORITHMS, *_LOSSES, *_ESTIMATORS, *_ADAPTED})


def whole_algorithms() -> list[str]:
    """The same without what is only a way to estimate advantages, for any of them."""
    return sorted({*_ALGORITHMS, *_LOSSES, *_ADAPTED})


def get_algorithm(name: str) -> Algorithm:
    """The algorithm of that name; where only a loss, an estimator or an adapter has it, the rest is Flow-GRPO's."""
    if name in _ALGORITHMS:
        return _ALGORITHMS.get(name)
    if name not in algorithm_names():
        raise ValueError(unknown("algorithm", name, algorithm_names()) + YOUR_OWN)
    parts = {"loss": _LOSSES, "adv_estimator": _ESTIMATORS}
    own = {part: name for part, registry in parts.items() if name in registry}
    return dataclasses.replace(_ALGORITHMS.get("flow_grpo"), name=name, description="", **own)


def get_diffusion_loss_fn(name: str) -> DiffusionLossFn:
    """The loss registered under ``name``, or that of the algorithm of that name."""
    return _LOSSES.get(_resolve(name, _LOSSES, "loss"))()


def get_diffusion_adv_estimator_fn(name_or_enum: str | DiffusionAdvantageEstimator) -> AdvantageFn:
    """The advantage estimator registered under a name, or that of the algorithm of that name."""
    return _ESTIMATORS.get(_resolve(_plain(name_or_enum), _ESTIMATORS, "adv_estimator"))


def adds_up_rewards(name_or_enum: str | DiffusionAdvantageEstimator) -> bool:
    """Whether an estimator's signature asks for several rewards of each image."""
    parameters = inspect.signature(get_diffusion_adv_estimator_fn(name_or_enum)).parameters
    return "sample_level_reward_components" in parameters


def rewards_of(estimator: AdvantageFn) -> str:
    """`one`, `several`, or `any` where it may read them and may not."""
    parameters = inspect.signature(estimator).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    either = takes_any or "sample_level_reward_components" in parameters
    return getattr(estimator, "rewards", "any" if either else "one")


def estimate_advantages(
    name_or_enum: str | DiffusionAdvantageEstimator, **available: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call an estimator with those of the available arguments that its signature names, or all if it takes ``**``."""
    fn = get_diffusion_adv_estimator_fn(name_or_enum)
    parameters = inspect.signature(fn).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        available = {name: value for name, value in available.items() if name in parameters}
    return fn(**available)


def resolve_algorithm_defaults(name: str, rollout_algo: C, diffusion_loss: Any) -> tuple[C, Any]:
    """`rollout.algo` and `actor.diffusion_loss` with what the user left null filled in, as new dataclasses."""
    algorithm = get_algorithm(name)
    rollout = {**ROLLOUT_DEFAULTS[algorithm.trainer_type], **algorithm.rollout}

    mode = diffusion_loss.loss_mode
    loss_name = algorithm.loss if mode in (None, name) else _resolve(mode, _LOSSES, "loss")
    defaults = dict(_LOSSES.get(loss_name).defaults)
    known_extra = defaults.pop("extra", {})
    if loss_name == algorithm.loss:
        defaults |= algorithm.loss_defaults
        known_extra = merge_extra(name, known_extra, defaults.pop("extra", {}))
    extra = merge_extra(loss_name, known_extra, diffusion_loss.extra)
    filled = fill_nulls(diffusion_loss, defaults, f'the settings of loss "{loss_name}"')
    return (
        fill_nulls(rollout_algo, rollout, f'the rollout of algorithm "{name}"'),
        dataclasses.replace(filled, loss_mode=loss_name, extra=extra),
    )


def fill_nulls(config: C, defaults: Mapping[str, Any], whose: str) -> C:
    """A copy of a config dataclass in which fields that are None take their default, where there is one."""
    fields = {f.name for f in dataclasses.fields(config)}
    for name in defaults:
        if name not in fields:
            raise ValueError(unknown(f"field in {whose}", name, fields))
    return dataclasses.replace(config, **{k: v for k, v in defaults.items() if getattr(config, k) is None})


def _plain(name: str | Enum) -> str:
    return name.value if isinstance(name, Enum) else name


def _resolve(name: str, registry: Registry, part: str) -> str:
    """``name`` itself where it is registered, else what the algorithm of that name uses."""
    if name in registry:
        return name
    if name not in algorithm_names():
        raise ValueError(unknown(registry.kind, name, {*registry.names(), *_ALGORITHMS.names()}))
    return getattr(get_algorithm(name), part)
