"""The machines of a `ray.address`: each is asked for what the run needs there, before anything of it starts."""

import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import ray
from omegaconf import DictConfig
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_omni.trainer.checks.hub_names import fetch, models_of
from verl_omni.trainer.checks.machines import RUN_DIR, needed_paths, variables_of_rewards
from verl_omni.trainer.failures import innermost, one_line
from verl_omni.utils.errors import RunError
from verl_omni.utils.external_lib import import_external_lib, names_of

# What has to be of one version: weights, prompts and settings go from one machine to another.
PACKAGES = ("verl-omni", "verl", "torch", "diffusers", "transformers", "peft", "safetensors")
SHARED = "a disk that all nodes share"
SECONDS = 5.0  # until what one machine writes is seen by all


class Asked(NamedTuple):
    """What a node has to have."""

    versions: dict[str, str]
    external_lib: list[str]
    paths: list[tuple[str, str]]  # setting and path
    variables: list[tuple[str, str]]  # setting and name
    folder: str
    mark: str


def on_nodes(function: Callable, arguments: Callable[[str], tuple]) -> dict[str, Any]:
    """Node -> its answer, of all of the cluster. What one cannot do is raised in one line with its address."""
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    places = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in addresses()}
    asked = {node: task.options(scheduling_strategy=there).remote(*arguments(node)) for node, there in places.items()}
    return {node: _answer(node, answer) for node, answer in asked.items()}


def _answer(node: str, answer: ray.ObjectRef) -> Any:
    try:
        return ray.get(answer)
    except RayError as error:
        cause = innermost(error)
        kind = "" if isinstance(cause, ValueError | FileNotFoundError | RunError) else f"{type(cause).__name__}: "
        raise RunError(f"node {addresses().get(node, node)}: {kind}{one_line(cause)}") from error


def addresses(alive: bool = True) -> dict[str, str]:
    """Node -> where it is; of those that live, or of those that have died."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"] is alive}


def check_nodes(config: DictConfig) -> None:
    """Every node has the packages, modules, files and variables of this run, and the run's folder is one for all."""
    folder, mark = Path(config.trainer.default_local_dir), f".seen_{uuid.uuid4().hex}"
    asked = Asked(
        versions=versions(),
        external_lib=names_of(config.actor_rollout_ref.model.external_lib),
        paths=needed_paths(config),
        variables=variables_of_rewards(config),
        folder=str(folder),
        mark=mark,
    )
    (folder / mark).touch()
    try:
        seen = on_nodes(has_all, lambda node: (asked, node))
        missing = [node for node in seen if not _appears(folder / f"{mark}_{node}")]
    finally:
        for path in folder.glob(f"{mark}*"):
            path.unlink()
    if missing:
        raise RunError(f"node {addresses()[missing[0]]}: {_not_shared(folder)}")


def has_all(asked: Asked, node: str) -> None:
    """On a node: raise one line on what it lacks."""
    for package, wanted in asked.versions.items():
        if (own := versions().get(package)) != wanted:
            raise ValueError(f"{package} is {own or 'not there'}, and {wanted} where the run was started: install that")
    import_external_lib(asked.external_lib)
    for setting, path in asked.paths:
        if not os.path.exists(path):
            raise ValueError(f'{setting}="{path}" is not there: put it on {SHARED}, or at that path on each')
    for setting, name in asked.variables:
        if not os.environ.get(name):
            raise ValueError(
                f"{setting} names {name}, a variable that is not set: take it along with ray.env_vars=[{name}]"
            )
    folder = Path(asked.folder)
    if not _appears(folder / asked.mark):
        raise ValueError(_not_shared(folder))
    try:
        (folder / f"{asked.mark}_{node}").touch()
    except OSError as error:
        raise ValueError(f'{RUN_DIR}="{folder}" cannot be written to: {error.strerror}') from None


def fetch_on_nodes(config: DictConfig) -> None:
    """What the hub has of the run's models comes to every machine, once to each."""
    if names := models_of(config):
        on_nodes(fetch, lambda node: (names,))


def versions() -> dict[str, str]:
    """Of Python and the packages; what is not installed is not named."""
    return {"python": platform.python_version()} | dict(_installed(PACKAGES))


def _installed(packages: Iterable[str]) -> Iterable[tuple[str, str]]:
    for package in packages:
        try:
            yield package, version(package)
        except PackageNotFoundError:  # on the path, as a checkout is
            continue


def _appears(path: Path) -> bool:
    end = time.monotonic() + SECONDS
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def _not_shared(folder: Path) -> str:
    return f'{RUN_DIR}="{folder}" is another folder there than where the run was started: choose one on {SHARED}'

