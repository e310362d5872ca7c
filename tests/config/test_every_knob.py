"""A walk over every knob of the schema: something reads it, or it is refused, or it is not there.

Reads are looked up in the source: `<owner>.<knob>`, where the owner is what that file calls the section. Checks do not
count as readers: a knob that is only checked changes no run.
"""

import ast
import dataclasses
import functools
from pathlib import Path

import pytest
import verl.trainer.ppo.reward
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tiny_models import tiny_checkpoint

import verl_omni
from verl_omni.config import DiffusionRolloutConfig, validation_pipeline
from verl_omni.config.knob import Knob, check_effect, value_of, walk
from verl_omni.config.rollout import ValPipelineConfig
from verl_omni.config.schema import DiffusionTrainerConfig, register
from verl_omni.trainer.checks.preparation import prepare_config

register()

KNOBS = {knob.name: knob for knob in walk(DiffusionTrainerConfig)}
ARR = "actor_rollout_ref"
CHECKS = {"config", "checks", "record.py"}

# What the code calls each section: a variable or an attribute, and in some files only (`file:name`).
OWNERS = {
    "data": {"data"},
    ARR: {ARR, "arr"},
    f"{ARR}.model": {"model", "model_config"},
    f"{ARR}.actor": {"actor", "actor_config", "losses.py:config"},
    f"{ARR}.actor.diffusion_loss": {"diffusion_loss", "flow_grpo.py:settings", "base.py:given"},
    f"{ARR}.actor.teacher": {"teacher"},
    f"{ARR}.actor.optim": {"optim", "optimizer_config", "optimizer.py:config"},
    f"{ARR}.actor.engine": {"common"},
    f"{ARR}.actor.fsdp_config": {"engine_config"},
    f"{ARR}.actor.veomni_config": {"veomni_impl.py:engine_config"},
    f"{ARR}.actor.checkpoint": {"checkpoint", "checkpoint_config"},
    f"{ARR}.rollout": {"rollout", "rollout_config", "engine.py:config", "batched.py:config"},
    f"{ARR}.rollout.checkpoint_engine": {"checkpoint_engine", "channel.py:config"},
    f"{ARR}.rollout.pipeline": {"pipeline", "sampling_params", "adapter.py:size"},
    f"{ARR}.rollout.algo": {"algo"},
    f"{ARR}.rollout.val_kwargs": {"sampling.py:val", "settings.py:val"},
    f"{ARR}.rollout.http": {"http"},
    f"{ARR}.rollout.pool": {"pool"},
    f"{ARR}.rollout.agent": {"agent"},
    f"{ARR}.ref": {"ref", "ref_config"},
    f"{ARR}.rewriter": {"rewriter", "rewriter.py:config", "text_rollout.py:config"},
    "algorithm": {"algorithm", "forward_process.py:algo", "policy_gradient_trainer.py:config", "advantages.py:config"},
    "reward": {"reward"},
    "reward.pairwise": {"pairwise"},
    "reward.validation": {"validation.py:own"},
    "reward.validation.custom_reward_function": {"validation.py:function"},
    "reward.custom_reward_function": {"reward_loop.py:custom", "reward_function.py:custom"},
    "reward.reward_model": {"reward_model", "placement.py:judge", "judge.py:config"},
    "reward.reward_manager": {"reward.py:reward_manager_cfg"},
    "reward.reward_manager.module": {"reward.py:module_cfg"},
    "algorithm.filter_groups": {"filter_groups", "filter_groups.py:config"},
    "algorithm.rollout_correction": {"rollout_correction.py:config"},
    "trainer": {"trainer"},
    "ray": {"ray"},
}
# Free text: it is told in the run's config.yaml and to the trackers.
TOLD = {"recipe"}
# Other words for a knob that is read: what they make of it is below.
RESOLVED = {
    "rollout.nnodes": (3, f"{ARR}.rollout.nnodes", 3),
    "rollout.n_gpus_per_node": (2, f"{ARR}.rollout.n_gpus_per_node", 2),
    "algorithm.rollout_correction.bypass_mode": (True, f"{ARR}.actor.old_log_probs", "rollout"),
}


@functools.cache
def reads() -> set[tuple[str, str, str]]:
    """(file, owner, name) of every attribute, `get`, `getattr` and subscript that is read; verl loads managers."""
    package = Path(verl_omni.__file__).parent
    own = [file for file in package.rglob("*.py") if not CHECKS & {*file.relative_to(package).parts}]
    found = set()
    for file in [*own, Path(verl.trainer.ppo.reward.__file__)]:
        for node in ast.walk(ast.parse(file.read_text())):
            for owner, name in _read(node):
                found.add((file.name, owner, name))
    return found


def _read(node: ast.AST) -> list[tuple[str, str]]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return [(_called(node.value), node.attr)]
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return [(_called(node.value), node.slice.value)]
    if isinstance(node, ast.Call) and node.args:
        if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and isinstance(node.args[0], ast.Constant):
            return [(_called(node.func.value), node.args[0].value)]
        if _called(node.func) == "getattr" and isinstance(node.args[1], ast.Constant):
            return [(_called(node.args[0]), node.args[1].value)]
    return []


def _called(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def is_read(name: str) -> bool:
    section, _, leaf = name.rpartition(".")
    owners = OWNERS[section]
    return any(read == leaf and (owner in owners or f"{file}:{owner}" in owners) for file, owner, read in reads())


WORKING = [name for name, knob in KNOBS.items() if not knob.waits]
VALIDATION = f"{ARR}.rollout.val_kwargs.pipeline."


@pytest.mark.parametrize("name", RESOLVED)
def test_another_word_for_a_knob_sets_it(name):
    value, other, becomes = RESOLVED[name]
    given = [f"{ARR}.model.path={tiny_checkpoint()}", "data.train_files=prompts.parquet", "trainer.mode=one_step_off"]
    with initialize_config_module("verl_omni.trainer.config", version_base=None):
        config = compose("diffusion_trainer", [*given, f"{name}={str(value).lower()}"])
        without = compose("diffusion_trainer", given)
    found, before = (OmegaConf.select(prepare_config(c), other) for c in (config, without))
    assert found == becomes != before


READ = [name for name in WORKING if name not in {*TOLD, *RESOLVED} and not name.startswith(VALIDATION)]


@pytest.mark.parametrize("name", READ)
def test_something_reads_it(name):
    assert is_read(name), f"nothing but checks reads {name}: make it work, or take it out of the schema"


def test_a_knob_that_nothing_reads_would_be_found(monkeypatch):
    assert not is_read(f"{ARR}.actor.fsdp_config.strategy") and not is_read("trainer.typo")
    assert is_read(f"{ARR}.actor.strategy")


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(ValPipelineConfig)])
def test_validation_takes_each_of_its_own_pipeline_knobs(name):
    config = DiffusionRolloutConfig()
    setattr(config.val_kwargs.pipeline, name, "mine")
    assert (
        getattr(validation_pipeline(config), name)
        == "mine"
        != getattr(validation_pipeline(DiffusionRolloutConfig()), name)
    )


# ---- what would change nothing is refused --------------------------------------------------------------


def changed(knob: Knob) -> DiffusionTrainerConfig:
    """The defaults, but for another value of this knob."""
    settings = DiffusionTrainerConfig()
    section, _, leaf = knob.name.rpartition(".")
    value = not knob.default if isinstance(knob.default, bool) else 0.125 if knob.range.choices is None else "other"
    setattr(value_of(settings, section), leaf, value)
    return settings


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.waits])
def test_a_knob_that_waits_takes_only_its_default(name):
    with pytest.raises(ValueError, match=name):
        check_effect(changed(KNOBS[name]), changed(KNOBS[name]))


@pytest.mark.parametrize("name", [name for name, knob in KNOBS.items() if knob.needs])
def test_a_knob_is_refused_without_what_it_needs(name):
    """What it needs is itself a knob, whose default or another value is what it needs."""
    other, _, wanted = KNOBS[name].needs.partition("=")
    assert other in KNOBS
    settings = changed(KNOBS[name])
    section, _, leaf = other.rpartition(".")
    if wanted and str(KNOBS[other].default).lower() in wanted.split(" or "):  # else its default is not what is needed
        setattr(value_of(settings, section), leaf, "something else")
    elif not wanted:
        setattr(value_of(settings, section), leaf, None)
    with pytest.raises(ValueError, match=f"{name}=.* has no effect with {other}="):
        check_effect(settings, settings)
    while other:  # what it needs may itself need another
        section, _, leaf = other.rpartition(".")
        setattr(value_of(settings, section), leaf, wanted.split(" or ")[-1] or 4)
        other, _, wanted = (KNOBS[other].needs or "").partition("=")
    check_effect(settings, settings)


def test_the_defaults_are_accepted():
    check_effect(DiffusionTrainerConfig(), DiffusionTrainerConfig())
