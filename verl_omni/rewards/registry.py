"""The rewards that a dataset's ``data_source`` column can name."""

import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from verl_omni.config.knob import Range
from verl_omni.utils.registry import Registry
from verl_omni.utils.suggest import unknown

RewardFn = Callable[..., list[dict[str, Any]]]

_REWARDS: Registry[RewardFn] = Registry("reward (data_source)")
_PACKAGES: dict[str, str] = {}


def register_reward(name: str, package: str | None = None) -> Callable[[RewardFn], RewardFn]:
    """Make a reward function available to rows whose ``data_source`` is ``name``.

    A reward function scores a batch:

        def compute_score(images: list, ground_truths: list[str], prompts: list[str],
                          extra_infos: list[dict]) -> list[dict]

    and returns, in the order of the images, one dict each with a number under "score"; further entries are logged.
    Its keyword-only parameters are settings, `reward.scorers.<name>.<parameter>` in the configuration. Their
    annotations are checked before a run starts: plain types, `Literal` and `Annotated[int, Range(least=1)]`. So
    is that the ``package`` is installed without which it cannot score.
    """

    def decorator(reward: RewardFn) -> RewardFn:
        _REWARDS.add(name, reward)
        if package is not None:
            _PACKAGES[name] = package
        return reward

    return decorator


def get_reward_fn(name: str) -> RewardFn:
    """The reward function registered under ``name``."""
    return _REWARDS.get(name)


def check_package(name: str) -> None:
    """The package that the reward needs is there, or one line says how to get it."""
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(f"the reward \"{name}\" needs {package}: pip install 'verl-omni[rewards]'")


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """`reward.scorers.<name>`: only settings that this reward has, with values that it can use."""
    reward = get_reward_fn(name)
    known = [key for key, p in inspect.signature(reward).parameters.items() if p.kind is p.KEYWORD_ONLY]
    kinds = get_type_hints(reward, include_extras=True)
    for key, value in settings.items():
        if key not in known:
            raise ValueError(unknown(f"setting of reward.scorers.{name}", key, known))
        _check_value(f"reward.scorers.{name}.{key}", value, kinds.get(key))


def _check_value(where: str, value: Any, kind: Any) -> None:
    allowed = Range()
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        allowed = next((note for note in notes if isinstance(note, Range)), allowed)
    if get_origin(kind) is Literal:
        kind, allowed = str, Range(choices=get_args(kind))
    if kind in (int, float, str, bool):
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise ValueError(f"{where}={value}: expected {kind.__name__}, not {type(value).__name__}")
    allowed.check(where, value)
