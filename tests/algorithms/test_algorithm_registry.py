"""Names: built-in, declared, implied by a loss or an estimator alone, and added by a user's module."""

import importlib.util
import subprocess
import sys
import textwrap

import pytest
import torch

from verl_omni.algorithms import (
    Algorithm,
    algorithm_names,
    fill_nulls,
    get_algorithm,
    registry,
    resolve_algorithm_defaults,
)
from verl_omni.algorithms.registry import estimate_advantages, register_algorithm
from verl_omni.config import DiffusionActorConfig, DiffusionLossConfig, DiffusionRolloutAlgoConfig
from verl_omni.trainer.diffusion import diffusion_algos as face
from verl_omni.utils.registry import Registry

BUILT_IN = ["awm", "dance_grpo", "diffusion_nft", "dpo", "flow_dppo", "flow_grpo", "grpo_guard", "mix_grpo"]

USER_MODULE = """
import torch
from verl_omni.trainer.diffusion.diffusion_algos import (
    Algorithm, DiffusionLossFn, DiffusionLossResult, register_algorithm, register_diffusion_adv_est,
    register_diffusion_loss,
)


@register_diffusion_loss("reinforce")
class ReinforceLoss(DiffusionLossFn):
    required_model_output_keys = ("log_probs",)
    required_data_keys = ("advantages",)
    defaults = {"adv_clip_max": 3.0, "extra": {"temperature": 2.0}}

    @classmethod
    def compute_loss(cls, *, log_prob, advantages, config):
        s = cls.settings(config)
        a = advantages.clamp(-s.adv_clip_max, s.adv_clip_max)
        return -(a * log_prob / s.temperature).mean(), {}

    def __call__(self, *, config, model_output, data):
        loss, metrics = self.compute_loss(
            log_prob=model_output["log_probs"], advantages=data["advantages"], config=config
        )
        return DiffusionLossResult(loss=loss, metrics=metrics)


@register_diffusion_adv_est("centred")
def centred(sample_level_rewards, index):
    return sample_level_rewards - sample_level_rewards.mean(), sample_level_rewards


register_algorithm(Algorithm("user_algo", loss="reinforce", adv_estimator="centred", rollout={"sde_type": "cps"},
                             loss_defaults={"adv_clip_max": 4.0, "extra": {"temperature": 5.0}}))
"""


@pytest.fixture(scope="module")
def user_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("user")
    (folder / "user_algorithms.py").write_text(USER_MODULE)
    sys.path.insert(0, str(folder))
    registries = (registry._LOSSES, registry._ESTIMATORS, registry._ALGORITHMS)
    algorithm_names()  # the built-in ones are there before the copy
    before = [dict(r._entries) for r in registries]
    import user_algorithms

    yield user_algorithms
    sys.path.remove(str(folder))
    for r, entries in zip(registries, before, strict=True):
        r._entries = entries


def resolved(name, rollout=None, **loss):
    loss = {"loss_mode": name} | loss
    return resolve_algorithm_defaults(name, DiffusionRolloutAlgoConfig(**(rollout or {})), DiffusionLossConfig(**loss))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_algorithms_resolve_everywhere_from_their_name(name):
    algorithm = get_algorithm(name)
    assert algorithm.name == name and algorithm.description
    assert type(face.get_diffusion_loss_fn(name)) is type(face.get_diffusion_loss_fn(algorithm.loss))
    assert callable(face.get_diffusion_adv_estimator_fn(name))
    rollout, loss = resolved(name)
    assert rollout.sde_type and rollout.noise_level is not None
    assert loss.loss_mode == algorithm.loss
    # what was filled in is what the loss runs with
    settings = face.get_diffusion_loss_fn(name).settings(DiffusionActorConfig(diffusion_loss=loss))
    assert {k: getattr(settings, k) for k in loss.extra} == loss.extra
    assert name in algorithm_names()


def test_variants_are_settings():
    assert isinstance(face.get_diffusion_loss_fn("mix_grpo"), face.FlowGRPOLoss)
    assert isinstance(face.get_diffusion_loss_fn("dance_grpo"), face.FlowGRPOLoss)
    assert isinstance(face.get_diffusion_loss_fn("grpo_guard"), face.GRPOGuardLoss)
    estimator = face.get_diffusion_adv_estimator_fn("grpo_guard")
    assert estimator is face.compute_flow_grpo_outcome_advantage
    assert resolved("dance_grpo")[0].sde_type == "dance_sde"
    assert resolved("mix_grpo")[0].sde_window_schedule == "progressive"
    nft = get_algorithm("diffusion_nft")
    assert (nft.trainer_type, nft.supports_cfg, nft.rollout_policy) == ("direct_preference", False, "old")
    assert resolved("diffusion_nft")[0].noise_level == 0.0


def test_what_the_user_sets_stays():
    rollout, loss = resolved("mix_grpo", {"noise_level": 0.2, "sde_window_size": 3}, clip_ratio=0.5, adv_clip_max=1.0)
    assert (rollout.noise_level, rollout.sde_window_size, rollout.sde_type) == (0.2, 3, "sde")
    assert (loss.clip_ratio, loss.adv_clip_max, loss.loss_mode) == (0.5, 1.0, "flow_grpo")
    # zero is a choice, null is not
    assert resolved("flow_grpo", {"noise_level": 0.0})[0].noise_level == 0.0
    given = DiffusionRolloutAlgoConfig()
    resolve_algorithm_defaults("flow_grpo", given, DiffusionLossConfig())
    assert given.sde_type is None  # a new dataclass, not the user's
    # another loss than the algorithm's own brings its own settings
    _, other = resolved("mix_grpo", loss_mode="flow_dppo", extra={"kl_mask_threshold": 0.1})
    assert other.loss_mode == "flow_dppo" and other.extra == {"kl_mask_threshold": 0.1}
    _, from_null = resolved("grpo_guard", loss_mode=None)
    assert from_null.loss_mode == "grpo_guard"


def test_unknown_settings_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match='"kl_mask_treshold": did you mean "kl_mask_threshold"'):
        resolved("flow_dppo", extra={"kl_mask_treshold": 1.0})
    with pytest.raises(ValueError, match='unknown field in the rollout of x "noise": did you mean "noise_level"'):
        fill_nulls(DiffusionRolloutAlgoConfig(), {"noise": 1.0}, "the rollout of x")


def test_a_users_module_works_from_one_name(user_module):
    loss_fn = face.get_diffusion_loss_fn("user_algo")
    assert isinstance(loss_fn, user_module.ReinforceLoss)
    rollout, loss = resolved("user_algo")
    assert rollout.sde_type == "cps" and rollout.noise_level == 0.7
    assert (loss.loss_mode, loss.adv_clip_max, loss.extra) == ("reinforce", 4.0, {"temperature": 5.0})
    result = loss_fn(
        config=DiffusionActorConfig(diffusion_loss=loss),
        model_output={"log_probs": torch.tensor([1.0, 2.0])},
        data={"advantages": torch.tensor([9.0, -1.0])},
    )
    assert result.loss == pytest.approx(-(4.0 * 1.0 - 1.0 * 2.0) / 5.0 / 2)
    # an estimator is given what its signature names, and no more
    rewards = torch.tensor([1.0, 3.0])
    advantages, _ = estimate_advantages("user_algo", sample_level_rewards=rewards, index=[0, 0], global_std=True)
    assert advantages.tolist() == [-1.0, 1.0]
    assert face.DiffusionAdvantageEstimator("centred") == "centred"


def test_a_loss_or_an_estimator_alone_implies_the_rest(user_module):
    by_loss = get_algorithm("reinforce")
    assert (by_loss.name, by_loss.loss, by_loss.adv_estimator) == ("reinforce", "reinforce", "flow_grpo")
    by_estimator = get_algorithm("centred")
    assert (by_estimator.loss, by_estimator.adv_estimator, by_estimator.adapter) == (
        "flow_grpo",
        "centred",
        "flow_grpo",
    )
    assert isinstance(face.get_diffusion_loss_fn("centred"), face.FlowGRPOLoss)
    assert resolved("reinforce")[1].extra == {"temperature": 2.0}
    assert face.get_diffusion_adv_estimator_fn("reinforce") is face.compute_flow_grpo_outcome_advantage
    assert {"reinforce", "centred", "user_algo"} <= set(algorithm_names())


def test_estimator_names_work_as_a_str_enum_does():
    member = face.DiffusionAdvantageEstimator.FLOW_GRPO
    assert member == "flow_grpo" and member.value == "flow_grpo" and isinstance(member, str)
    assert face.DiffusionAdvantageEstimator("flow_grpo") is member
    assert face.get_diffusion_adv_estimator_fn(member) is face.compute_flow_grpo_outcome_advantage
    assert face.get_diffusion_adv_estimator_fn("gdpo") is face.compute_gdpo_outcome_advantage
    with pytest.raises(ValueError, match='unknown advantage estimator "gpdo": did you mean "gdpo"'):
        face.DiffusionAdvantageEstimator("gpdo")


@pytest.mark.parametrize(
    ("lookup", "kind"),
    [
        (get_algorithm, "algorithm"),
        (face.get_diffusion_loss_fn, "diffusion loss"),
        (face.get_diffusion_adv_estimator_fn, "advantage estimator"),
    ],
)
def test_unknown_names_come_with_the_nearest(lookup, kind):
    with pytest.raises(ValueError, match=f'unknown {kind} "flow_grop": did you mean "flow_grpo"'):
        lookup("flow_grop")


def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match='algorithm "mix_grpo" is already registered'):
        register_algorithm(Algorithm("mix_grpo", description="another"))
    register_algorithm(get_algorithm("mix_grpo"))  # the same again is no conflict

    class Impostor(face.FlowGRPOLoss):
        pass

    with pytest.raises(ValueError, match="already registered by verl_omni.algorithms.flow_grpo.FlowGRPOLoss"):
        face.register_diffusion_loss("flow_grpo")(Impostor)
    with pytest.raises(TypeError, match="non-empty string"):
        Registry("thing").add("", Impostor)


def test_a_file_under_two_names_defines_the_same(tmp_path):
    """A module that a run imports by its name, and by its path as a reward function."""
    code = """
        class Thing: pass
        def function(): pass
        things.add("mine", Thing)
        functions.add("mine", function)
    """
    (tmp_path / "twice.py").write_text(textwrap.dedent(code))
    things, functions = Registry("thing"), Registry("function")
    for name in ("twice", "custom_module_1"):
        spec = importlib.util.spec_from_file_location(name, tmp_path / "twice.py")
        module = importlib.util.module_from_spec(spec)
        module.things, module.functions = things, functions
        spec.loader.exec_module(module)
        assert things.get("mine") is module.Thing and functions.get("mine") is module.function
    with pytest.raises(ValueError, match='thing "mine" is already registered by custom_module_1.Thing'):
        things.add("mine", Registry)


def test_a_wrong_declaration_is_refused():
    with pytest.raises(ValueError, match='trainer_type of algorithm "x" "policy_gradent": did you mean'):
        Algorithm("x", trainer_type="policy_gradent")
    with pytest.raises(ValueError, match='rollout_policy of algorithm "x" is "current" or "old"'):
        Algorithm("x", rollout_policy="new")


@pytest.mark.parametrize(
    "first",
    [
        "import verl_omni.algorithms.grpo_guard",
        "import verl_omni.algorithms.diffusion_nft",
        "import verl_omni.trainer.diffusion.diffusion_algos",
        "from verl_omni.algorithms import get_algorithm; get_algorithm('flow_grpo')",
    ],
)
def test_any_file_may_be_imported_first_and_the_package_loads_none(first):
    code = f"""
    import sys, verl_omni.algorithms
    assert not any(m.startswith("verl_omni.algorithms.flow_grpo") for m in sys.modules)
    assert "verl" not in sys.modules and "diffusers" not in sys.modules
    {first}
    from verl_omni.algorithms import algorithm_names
    print(*algorithm_names())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(BUILT_IN) <= set(done.stdout.split())
