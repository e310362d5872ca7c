"""A run's parts in this one process, without Ray: what `check` and `overfit` stand on."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

ARR = "actor_rollout_ref."
# One device, the engine that draws with the weights that are trained, and nothing that takes minutes to compile.
ALONE = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.mode": "colocated",
    "trainer.max_staleness": None,
    "trainer.stale_groups": "drop",
    "trainer.replay": None,
    "trainer.resume_mode": "disable",
    "trainer.logger": ["jsonl"],
    "ray.address": None,
    "rollout.n_gpus_per_node": None,
    "rollout.nnodes": None,
    f"{ARR}hybrid_engine": True,
    f"{ARR}rollout.name": "diffusers",
    f"{ARR}rollout.engine_kwargs": {},
    f"{ARR}rollout.n_gpus_per_node": None,
    f"{ARR}rollout.nnodes": None,
    f"{ARR}rollout.compile_vae": False,
    f"{ARR}actor.engine.use_torch_compile": False,
    # What fails is to be known at once.
    "reward.on_failure": "stop",
    "reward.retries": 0,
}


def load_libraries(config: DictConfig) -> None:
    """They take seconds, in which the screen would be empty."""
    from verl_omni.cli.train import import_checks

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # if it comes to that: there is no log for the rest
    with step("libraries, loaded"):
        import_checks(config)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say what is waited for, and how long it took."""
    began = time.perf_counter()
    print(f"{what} ...", end=" ", flush=True)
    try:
        yield
    except BaseException:
        print("no", flush=True)
        raise
    print(f"{time.perf_counter() - began:.1f} s", flush=True)


def prepared(config: DictConfig) -> DictConfig:
    """All checks that `train` makes before it starts Ray."""
    from verl_omni.trainer.checks.hub_names import fetch_models
    from verl_omni.trainer.checks.preflight import preflight
    from verl_omni.trainer.resources import choose_device
    from verl_omni.trainer.runner import check_groups

    check_groups(config)
    with open_dict(config):
        config.trainer.device = choose_device(config.trainer.device)
    config = preflight(config)
    fetch_models(config)
    return config


def alone(config: DictConfig, changes: Mapping[str, Any]) -> DictConfig:
    """A copy of a run's configuration for this process, with what else is to be different."""
    if config.reward.reward_model.enable:
        raise ValueError("reward.reward_model.enable=true: this command starts no judge; leave it out, and its reward")
    config = OmegaConf.create(OmegaConf.to_container(config, resolve=False), flags={"allow_objects": True})
    for name, value in (ALONE | dict(changes)).items():
        OmegaConf.update(config, name, value, merge=False, force_add=True)
    return config


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    from verl_omni.cli import hydra_errors
    from verl_omni.trainer.failures import users_mistake

    try:
        yield
    except KeyboardInterrupt:
        sys.exit("stopped by Ctrl-C")
    except Exception as error:
        line = hydra_errors.unset_variable(error) or users_mistake(error)
        if line is None or hydra_errors.TRACEBACKS:
            raise
        sys.exit(f"error: {line}")
