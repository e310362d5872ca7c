"""A user's own modules, which register algorithms, models or rewards: every process imports them."""

import importlib
import sys
from typing import Any

from verl_omni.utils.registry import registrations
from verl_omni.utils.time_limit import time_limit


def import_external_lib(names: Any, setting: str = "actor_rollout_ref.model.external_lib") -> None:
    """`names`: null, one dotted module name, or several (a list, or separated by commas), as `setting` gives them."""
    for name in module_names(names):
        try:
            with time_limit():
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.split(".")[0] and error.name != name:
                raise
            raise ModuleNotFoundError(
                f'{setting}="{name}" cannot be imported: is its folder on PYTHONPATH?'
            ) from error
        except ValueError:  # a registration that is refused says what is wrong
            raise
        except Exception as error:
            raise ValueError(
                f'{setting}="{name}" cannot be imported: {type(error).__name__}: {error}'
            ) from error


def with_registered(names: Any) -> Any:
    """`names`, and the modules that a launcher imported by itself: what they registered, workers need too."""
    listed = module_names(names)
    if "__main__" in registrations:
        raise ValueError(
            f"the script that was started registers {registrations['__main__']} itself, and worker processes cannot "
            "import a running script: move that into a module of its own, and import it or name it in "
            "actor_rollout_ref.model.external_lib"
        )
    for module in registrations:
        if not any(f"{module}.".startswith(f"{name}.") for name in listed) and _importable(module):
            listed.append(module)
    return listed if len(listed) > len(module_names(names)) else names


def _importable(module: str) -> bool:
    """Whether another process can import it by its name, which it cannot for a file that was loaded by its path."""
    return any(finder.find_spec(module.split(".")[0], None) is not None for finder in sys.meta_path)


def module_names(names: Any) -> list[str]:
    """`actor_rollout_ref.model.external_lib` as a list."""
    parts = names.split(",") if isinstance(names, str) else list(names or ())
    return [part.strip() for part in parts if part.strip()]
