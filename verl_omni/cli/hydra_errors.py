"""A mistake on the command line or in a recipe, in one line. Hydra itself prints several, or a traceback."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from verl_omni.cli.supervisor import RAISES, TRACEBACKS

MISTAKES = (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError)


@contextmanager
def in_one_line(arguments: list[str]) -> Iterator[None]:
    """Around Hydra's call of the run: what it finds wrong before that is said in one line."""
    os.environ[RAISES] = "1"
    try:
        yield
    except MISTAKES as error:
        if TRACEBACKS:
            raise
        sys.exit(f"error: {one_line(error, arguments)}")
    finally:
        if not TRACEBACKS:
            del os.environ[RAISES]


def one_line(error: Exception, arguments: list[str]) -> str:
    """What is wrong, in the words of Hydra, OmegaConf or YAML, with the setting or file that it is about."""
    if isinstance(error, OverrideParseException):
        return f'cannot read the argument "{error.override}": {_first(error)}. A setting is key=value, a list key=[a,b]'
    if isinstance(error, MissingConfigException):
        return (
            f"{_first(error)}: a recipe is --config-dir DIR --config-name NAME, for DIR/NAME.yaml; `verl-omni recipes` "
            "lists those that are shipped, which `verl-omni train NAME` takes"
        )
    if isinstance(error, UnicodeDecodeError):
        return f"the recipe {recipe(arguments)} is no text in UTF-8: {error}"
    if unset := unset_variable(error):
        return unset
    cause = error.__cause__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException) and cause.msg:
        known = recipe(arguments)
        about = f" (a recipe begins with `defaults: [diffusion_trainer, _self_]`; does {known}?)" if known else ""
        return f"{_first(error)}: {_first(cause)}{about if 'not in struct' in str(cause) else ''}"
    return " ".join(str(error).split())


def unset_variable(error: Exception) -> str | None:
    """A recipe's `${oc.env:NAME}` without a NAME in the environment."""
    unset = re.search(r"Environment variable '(\w+)' not found", str(error))
    key = getattr(error, "full_key", None) or "a setting"
    told = f"{key} comes from the environment variable {{}}, which is not set: set it, or type {key}=..."
    return told.format(unset[1]) if unset else None


def recipe(arguments: list[str]) -> str:
    """The name that was given with --config-name, or nothing."""
    given = iter(arguments)
    for argument in given:
        name, _, value = argument.partition("=")
        if name in ("--config-name", "-cn"):
            return value or next(given, "")
    return ""


def _first(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".:")
