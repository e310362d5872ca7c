"""A user's own modules, which register algorithms, models or rewards: every process imports them."""

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from verl_omni.utils.registry import registrations
from verl_omni.utils.time_limit import time_limit

FILES: dict[str, str] = {}  # of modules that were named by their file: other processes need the file too


def import_external_lib(names: Any, setting: str = "actor_rollout_ref.model.external_lib") -> None:
    """`names`: null, a dotted module name or a file `x.py`, or several (a list, or separated by commas)."""
    for name in names_of(names):
        try:
            with time_limit():
                _import(name, setting)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):  # one that it imports itself
                raise ModuleNotFoundError(
                    f'{setting}="{name}" cannot be imported: {_imported_at(error)} wants the module "{error.name}", '
                    "which is not installed, or not on PYTHONPATH"
                ) from error
            here = f" Or name the file that is here: {setting}={name}.py" if os.path.isfile(f"{name}.py") else ""
            raise ModuleNotFoundError(
                f'{setting}="{name}" cannot be imported: is its folder on PYTHONPATH?{here}'
            ) from error
        except ValueError:  # a registration that is refused says what is wrong
            raise
        except Exception as error:
            raise ValueError(
                f'{setting}="{name}" cannot be imported: {type(error).__name__}: {error}'
            ) from error


def _imported_at(error: BaseException) -> str:
    """The last line of a user's that an import went through; importlib's own frames are none."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen ")]
    return f"{frames[-1].filename}, line {frames[-1].lineno},"


def _import(name: str, setting: str) -> None:
    """A file is imported by its own name, so that other processes find what was pickled here."""
    module = module_name(name)
    if module == name:
        importlib.import_module(name)
        return
    file = Path(os.path.abspath(os.path.expanduser(name)))
    if not file.is_file():
        raise ValueError(f'{setting}="{name}": there is no such file in {file.parent}: name its path')
    if not module.isidentifier():
        raise ValueError(f'{setting}="{name}": a module cannot be called "{module}": rename the file')
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # at the end: it hides nothing
        importlib.invalidate_caches()
    found = getattr(importlib.import_module(module), "__file__", None)
    if found is None or not file.samefile(found):
        other = found or "a part of Python"
        raise ValueError(f'{setting}="{name}": another module has that name ({other}): rename the file')
    FILES[module] = str(file)


def with_registered(names: Any) -> Any:
    """`names`, and the modules that a launcher imported by itself: what they registered, workers need too."""
    listed = names_of(names)
    known = [module_name(name) for name in listed]
    if "__main__" in registrations:
        raise ValueError(
            f"the script that was started registers {registrations['__main__']} itself, and worker processes cannot "
            "import a running script: move that into a module of its own, and import it or name it in "
            "actor_rollout_ref.model.external_lib"
        )
    for module in registrations:
        if not any(f"{module}.".startswith(f"{name}.") for name in known) and _importable(module):
            listed.append(FILES.get(module, module))
    return listed if len(listed) > len(known) else names


def _importable(module: str) -> bool:
    """Whether another process can import it by its name, which it cannot for a file that was loaded by its path."""
    return any(finder.find_spec(module.split(".")[0], None) is not None for finder in sys.meta_path)


def names_of(names: Any) -> list[str]:
    """`actor_rollout_ref.model.external_lib` as a list."""
    parts = names.split(",") if isinstance(names, str) else list(names or ())
    return [part.strip() for part in parts if part.strip()]


def is_file(name: str) -> bool:
    return name.endswith(".py")


def module_name(name: str) -> str:
    """What it is imported as."""
    return Path(name).stem if is_file(name) else name
