"""A run's parts in this one process, without Ray: what `check` and `overfit` stand on."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_omni.config import DiffusionRolloutConfig
from verl_omni.config.algorithm import RolloutCorrectionConfig
from verl_omni.config.keys import structured
from verl_omni.config.rollout import CheckpointEngineConfig, HttpConfig
from verl_omni.config.schema import RewardModelConfig

ARR = "actor_rollout_ref."
FSDP, ROLLOUT = f"{ARR}actor.fsdp_config", f"{ARR}rollout"
# One device, the engine that draws with the weights that are trained, and nothing that takes minutes to compile.
ALONE = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.mode": "colocated",
    "trainer.max_staleness": None,
    "trainer.stale_groups": "drop",
    "trainer.replay": None,
    "trainer.resume_mode": "disable",
    "trainer.resume_from_path": None,
    "trainer.keep_best": False,
    "trainer.profile_step": None,
    "trainer.logger": ["jsonl"],
    "reward.validation.scorers": None,  # what is looked at is what training learns from
    "reward.validation.custom_reward_function.path": None,
    "ray.address": None,
    "ray.env_vars": [],
    "rollout.n_gpus_per_node": None,
    "rollout.nnodes": None,
    f"{ARR}hybrid_engine": True,
    f"{FSDP}.fsdp_size": -1,
    f"{FSDP}.ulysses_sequence_parallel_size": 1,
    f"{ARR}actor.veomni_config.fsdp_size": -1,
    f"{ARR}actor.veomni_config.ulysses_parallel_size": 1,
    f"{ARR}actor.teacher.n_gpus_per_node": None,
    f"{ARR}actor.teacher.nnodes": None,
    f"{ARR}actor.engine.use_torch_compile": False,
    f"{ARR}actor.engine.compile_ahead": None,
    f"{ROLLOUT}.name": "diffusers",
    f"{ROLLOUT}.engine_kwargs": {},
    f"{ROLLOUT}.n_gpus_per_node": None,
    f"{ROLLOUT}.nnodes": None,
    f"{ROLLOUT}.gather": "whole",
    f"{ROLLOUT}.share_samples": False,
    f"{ROLLOUT}.server_restarts": DiffusionRolloutConfig().server_restarts,
    f"{ROLLOUT}.checkpoint_engine": asdict(CheckpointEngineConfig()),
    f"{ROLLOUT}.http": asdict(HttpConfig()),
    f"{ROLLOUT}.compile_vae": False,
    "reward.reward_model.nnodes": 1,
    # What fails is to be known at once.
    "reward.on_failure": "stop",
    "reward.retries": 0,
}


def load_libraries(config: DictConfig) -> None:
    """They take seconds, in which the screen would be empty. A reward function with a mistake is told before them."""
    from verl_omni.cli.train import import_checks
    from verl_omni.trainer.checks.reward_trial import try_first

    with mistakes_in_one_line():
        try_first(config)
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
    """A run's configuration for this process, with what else is to be different, prepared."""
    from verl_omni.trainer.checks.rewards import asks_judge

    config = OmegaConf.create(OmegaConf.to_container(config, resolve=False), flags={"allow_objects": True})
    for name, value in (ALONE | dict(changes)).items():
        OmegaConf.update(config, name, value, merge=False, force_add=True)
    if config.reward.reward_model.enable and not asks_judge(config):  # validation does
        OmegaConf.update(config, "reward.reward_model", asdict(RewardModelConfig()), merge=False)
    if draws_as_it_trains(config):  # of earlier weights, or in another arithmetic, there was something to correct
        OmegaConf.update(config, "algorithm.rollout_correction", asdict(RolloutCorrectionConfig()), merge=False)
    return prepared(config)


def draws_as_it_trains(config: DictConfig) -> bool:
    from verl_omni.trainer.checks.correction import same_arithmetic

    return same_arithmetic(OmegaConf.to_object(OmegaConf.merge(structured(), config)))


@contextmanager
def judge(config: DictConfig) -> Iterator[str | None]:
    """The address of the run's judge, started for as long as this lasts; None where it has none."""
    served = config.reward.reward_model
    if not served.enable:
        yield None
        return
    from verl_omni.rewards.judge import LOG, JudgeServer

    log = Path(config.trainer.default_local_dir) / LOG.format(number=0)
    server = JudgeServer(served.command, served.model_path, served.n_gpus_per_node, str(log))
    if config.trainer.device == "cuda":  # beside the first device, where the model is
        server.environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices_after_the_first(served.n_gpus_per_node))
    with step("the judge, started"):
        address = server.start(served.start_timeout)
    try:
        yield address
    finally:
        server.stop()


def devices_after_the_first(count: int) -> list[str]:
    import torch

    there = torch.cuda.device_count()
    if there <= count:
        raise ValueError(
            f"reward.reward_model.n_gpus_per_node={count}: the judge takes GPUs beside the one that draws, and there "
            f"are {there} here; try it on a machine that has {count + 1}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(there)]
    return names[1 : count + 1]


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
