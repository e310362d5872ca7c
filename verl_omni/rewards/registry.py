"""Rewards by name."""

import importlib
import importlib.util
import inspect
import pkgutil
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from verl_omni.config.knob import Range
from verl_omni.utils.registry import Registry
from verl_omni.utils.responses import GIVEN_MANY
from verl_omni.utils.secrets import revealed
from verl_omni.utils.suggest import unknown

Scores = list[dict[str, Any]]
# A function, or a class whose instances are called like one.
RewardFn = Callable[..., Any]


def _load_builtin() -> None:
    """Every file in scorers/ registers its own."""
    folder = importlib.import_module("verl_omni.rewards.scorers")
    for module in pkgutil.iter_modules(folder.__path__):
        importlib.import_module(f"{folder.__name__}.{module.name}")


_REWARDS: Registry[RewardFn] = Registry("reward (data_source)", _load_builtin)
_PACKAGES: dict[str, str] = {}
_READS: dict[str, tuple[str, ...]] = {}


def register_reward(
    name: str, package: str | None = None, reads: tuple[str, ...] = ()
) -> Callable[[RewardFn], RewardFn]:
    """Make a reward available to rows whose ``data_source`` is ``name``, and to ``reward.scorers``.

    A reward scores a batch. It is a function:

        def compute_score(images: list, ground_truths: list[str], prompts: list[str],
                          extra_infos: list[dict]) -> list[dict]

    that returns, in the order of the images, one dict each with a number under "score"; further entries are logged.
    Or it is a class, for rewards that load a model: ``__init__`` runs once in each process that scores, ``__call__``
    is that function. An image is a PIL image, a video a list of them.

    Keyword-only parameters, of the function or of ``__init__``, are settings, `reward.scorers.<name>.<parameter>` in
    the configuration. Their annotations are checked before a run starts: plain types, `Literal` and
    `Annotated[int, Range(least=1)]`. So is that the ``package`` is installed without which it cannot score, and that
    rows have what it ``reads`` and cannot do without: "prompt", "ground_truth".
    """

    def decorator(reward: RewardFn) -> RewardFn:
        _REWARDS.add(name, reward)
        if package is not None:
            _PACKAGES[name] = package
        _READS[name] = reads
        return reward

    return decorator


def get_reward_fn(name: str) -> RewardFn:
    """The function or class registered under ``name``."""
    return _REWARDS.get(name)


def reward_names() -> list[str]:
    """All that is registered."""
    return _REWARDS.names()


def looks_at(name: str) -> list[str]:
    """What of a response it takes, as for one sample: image, audio, ..."""
    taken = [parameter.name for parameter in columns_of(get_reward_fn(name))]
    return [name.removesuffix("s") for name in taken if name in GIVEN_MANY]


def reads(name: str) -> tuple[str, ...]:
    """What it cannot do without, beside the image."""
    get_reward_fn(name)
    return _READS.get(name, ())


def about(name: str) -> str:
    """The first sentence of its description."""
    text = inspect.getdoc(get_reward_fn(name)) or ""
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "").rstrip(".")


def missing_package(name: str) -> str | None:
    """The package that it needs, where that is not installed."""
    package = _PACKAGES.get(name)
    return package if package is not None and importlib.util.find_spec(package) is None else None


def required_settings(name: str) -> list[str]:
    """Those without a default."""
    return [key for key, parameter in _settings(get_reward_fn(name)).items() if parameter.default is parameter.empty]


def default_settings(name: str) -> dict[str, Any]:
    """Those that have a default, with it."""
    known = _settings(get_reward_fn(name))
    return {key: parameter.default for key, parameter in known.items() if parameter.default is not parameter.empty}


def _settings(reward: RewardFn) -> dict[str, inspect.Parameter]:
    takes = reward.__init__ if inspect.isclass(reward) else reward
    return {key: p for key, p in inspect.signature(takes).parameters.items() if p.kind is p.KEYWORD_ONLY}


def columns_of(reward: RewardFn) -> list[inspect.Parameter]:
    """What it takes of a batch: its parameters that are no settings."""
    parameters = inspect.signature(reward.__call__ if inspect.isclass(reward) else reward).parameters.values()
    return [p for p in parameters if p.name != "self" and p.kind is not p.KEYWORD_ONLY]


def make_scorer(name: str, settings: Mapping[str, Any] | None = None) -> Callable[..., Scores]:
    """What scores a batch of images, with its settings; the model of a class is loaded here."""
    reward, settings = get_reward_fn(name), revealed(dict(settings or {}), f"reward.scorers.{name}")
    return reward(**settings) if inspect.isclass(reward) else partial(reward, **settings)


class LoadedOnce:
    """A class of a reward as a function: its model is loaded by the first call, and once, whoever else calls.

    A class may say by `needs(settings)` which of the columns that it can do without it asks for with these settings.
    """

    def __init__(self, cls: type, settings: Mapping[str, Any]):
        self._make, self._lock = partial(cls, **settings), threading.Lock()
        self._scorer: Callable[..., Scores] | None = None
        needed = cls.needs(settings) if hasattr(cls, "needs") else ()
        columns = [p.replace(default=p.empty) if p.name in needed else p for p in columns_of(cls)]
        self.__signature__ = inspect.Signature(columns)

    def load(self) -> Callable[..., Scores]:
        with self._lock:
            if self._scorer is None:
                self._scorer = self._make()
            return self._scorer

    def __call__(self, *args: Any, **kwargs: Any) -> Scores:
        return self.load()(*args, **kwargs)


def check_package(name: str) -> None:
    """The package that the reward needs is there, or one line says how to get it."""
    if package := missing_package(name):
        raise ModuleNotFoundError(f"the reward \"{name}\" needs {package}: pip install 'verl-omni[rewards]'")


def check_settings(name: str, settings: Mapping[str, Any], label: str | None = None) -> None:
    """`reward.scorers.<label>`: only settings that this reward has, with values that it can use, and all it needs."""
    reward, label = get_reward_fn(name), label or name
    takes = reward.__init__ if inspect.isclass(reward) else reward
    known = _settings(reward)
    kinds = get_type_hints(takes, include_extras=True)
    for key, value in settings.items():
        if key not in known:
            raise ValueError(unknown(f"setting of reward.scorers.{label}", key, known))
        revealed(value, f"reward.scorers.{label}.{key}")  # it is there; and no line below may show it
        _check_value(f"reward.scorers.{label}.{key}", value, kinds.get(key))
    for key in required_settings(name):
        if key not in settings:
            raise ValueError(f'the reward "{name}" needs reward.scorers.{label}.{key}')


ANY = Range()


def _check_value(where: str, value: Any, kind: Any, allowed: Range = ANY) -> None:
    if get_origin(kind) is Annotated:
        kind, *notes = get_args(kind)
        return _check_value(where, value, kind, next((note for note in notes if isinstance(note, Range)), allowed))
    if type(None) in get_args(kind):  # `str | None`, with a range inside or outside
        (kind,) = (k for k in get_args(kind) if k is not type(None))
        return None if value is None else _check_value(where, value, kind, allowed)
    if get_origin(kind) is Literal:
        kind, allowed = str, Range(choices=get_args(kind))
    if kind in (int, float, str, bool):
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits:
            raise ValueError(f"{where}={value}: expected {kind.__name__}, not {type(value).__name__}")
    allowed.check(where, value)
