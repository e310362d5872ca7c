"""Every loss against its formula and the formula's gradient, both in float64; and any split of a batch adds up."""

import loss_cases as cases
import pytest
import torch
from loss_cases import ROWS, actor_config, direct_preference_case, policy_gradient_case

from verl_omni.algorithms.base import DiffusionLossFn
from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler
from verl_omni.trainer.diffusion.diffusion_algos import (
    DPOLoss,
    FlowDPPOLoss,
    FlowGRPOLoss,
    GRPOGuardLoss,
    KLLoss,
    get_diffusion_loss_fn,
)
from verl_omni.workers.losses import build_loss_function

# name -> (case, the formula of one row or pair, how many of them)
FORMULAS = {
    "flow_grpo": (
        lambda: policy_gradient_case("flow_grpo", clip_ratio=0.2),
        lambda m, d, i: cases.flow_grpo_row(m, d, i, 0.2, 0.2),
        ROWS,
    ),
    "flow_grpo low/high, advantage clamp": (
        lambda: policy_gradient_case("flow_grpo", clip_ratio_low=0.1, clip_ratio_high=0.4, adv_clip_max=0.7),
        lambda m, d, i: cases.flow_grpo_row(m, d, i, 0.1, 0.4, 0.7),
        ROWS,
    ),
    "flow_grpo defaults": (
        lambda: policy_gradient_case("flow_grpo", spread=1e-4),
        lambda m, d, i: cases.flow_grpo_row(m, d, i, 1e-4, 1e-4),
        ROWS,
    ),
    "mix_grpo is flow_grpo's loss": (
        lambda: policy_gradient_case("mix_grpo", clip_ratio=0.2),
        lambda m, d, i: cases.flow_grpo_row(m, d, i, 0.2, 0.2),
        ROWS,
    ),
    "grpo_guard": (
        lambda: policy_gradient_case("grpo_guard", clip_ratio=0.1),
        lambda m, d, i: cases.grpo_guard_row(m, d, i, 0.1, 0.1),
        ROWS,
    ),
    "grpo_guard by shares": (
        lambda: policy_gradient_case("grpo_guard", shares=True, clip_ratio=0.1),
        lambda m, d, i: cases.grpo_guard_row(m, d, i, 0.1, 0.1),
        ROWS,
    ),
    "tempflow_grpo": (
        lambda: policy_gradient_case("tempflow_grpo", clip_ratio=0.2),
        lambda m, d, i: cases.tempflow_row(m, d, i, 0.2, 0.2, 2.25),
        ROWS,
    ),
    "tempflow_grpo scaled": (
        lambda: policy_gradient_case("tempflow_grpo", clip_ratio=0.2, extra={"weight_scale": 0.5}),
        lambda m, d, i: cases.tempflow_row(m, d, i, 0.2, 0.2, 0.5),
        ROWS,
    ),
    "flash_grpo": (
        lambda: policy_gradient_case("flash_grpo", clip_ratio=0.2),
        lambda m, d, i: cases.flash_row(m, d, i, 0.2, 0.2),
        ROWS,
    ),
    "flow_dppo": (
        lambda: policy_gradient_case("flow_dppo", extra={"kl_mask_threshold": 1e-3}),
        lambda m, d, i: cases.flow_dppo_row(m, d, i, 1e-3),
        ROWS,
    ),
    "flow_dppo by shares": (
        lambda: policy_gradient_case("flow_dppo", shares=True, extra={"kl_mask_threshold": 1e-3}),
        lambda m, d, i: cases.flow_dppo_row(m, d, i, 1e-3),
        ROWS,
    ),
    "opd": (lambda: policy_gradient_case("opd"), cases.opd_row, ROWS),
    "opd by shares": (lambda: policy_gradient_case("opd", shares=True), cases.opd_row, ROWS),
    "opd_forward": (
        lambda: direct_preference_case("opd_forward"),
        lambda m, d, i: ((m["velocity"][i] - d["teacher_velocity"][i]) ** 2).mean(),
        ROWS,
    ),
    "draft": (
        lambda: direct_preference_case("draft", extra={"kl_beta": 0.2}),
        lambda m, d, i: cases.draft_row(m, d, i, 0.2),
        ROWS,
    ),
    "draft defaults": (lambda: direct_preference_case("draft"), lambda m, d, i: cases.draft_row(m, d, i, 0.0), ROWS),
    "dpo": (
        lambda: direct_preference_case("dpo", extra={"beta": 30.0}),
        lambda m, d, i: cases.dpo_pair(m, d, i, 30.0),
        ROWS // 2,
    ),
    "diffusion_nft": (
        lambda: direct_preference_case("diffusion_nft", adv_clip_max=2.0, extra={"beta": 0.3, "kl_beta": 0.1}),
        lambda m, d, i: cases.nft_row(m, d, i, 0.3, 2.0, 0.1),
        ROWS,
    ),
    "diffusion_nft defaults": (
        lambda: direct_preference_case("diffusion_nft"),
        lambda m, d, i: cases.nft_row(m, d, i, 1.0, 5.0, 1e-4),
        ROWS,
    ),
    "dgpo": (
        lambda: direct_preference_case("dgpo", extra={"beta": 30.0}),
        lambda m, d, i: cases.dgpo_row(m, d, i, 30.0, 0.01),
        ROWS,
    ),
    "dgpo against the average": (
        lambda: direct_preference_case("dgpo", clip_ratio=0.02, extra={"anchor": "ema"}),
        lambda m, d, i: cases.dgpo_row(m, d, i, 100.0, 0.02, "ema_velocity"),
        ROWS,
    ),
    "crd": (
        lambda: direct_preference_case("crd", extra={"beta": 7.0}),
        lambda m, d, i: cases.crd_row(m, d, i, 7.0),
        ROWS,
    ),
    "crd two-sided": (
        lambda: direct_preference_case("crd", extra={"temperature": 2.0}),
        lambda m, d, i: cases.crd_row(m, d, i, 100.0, 2.0),
        ROWS,
    ),
    **{
        f"awm {weighting}": (
            lambda weighting=weighting: direct_preference_case(
                "awm", clip_ratio=1e-3, extra={"weighting": weighting, "kl_beta": 0.2, "ema_kl_beta": 0.3}
            ),
            lambda m, d, i, weighting=weighting: cases.awm_row(m, d, i, weighting, 1e-3, 1e-3, 0.2, 0.3),
            ROWS,
        )
        for weighting in ("uniform", "t", "t2", "huber", "ghuber")
    },
}


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_equal_the_formula(name):
    make, row, count = FORMULAS[name]
    case = make()
    result = case.run()
    expected = sum(row(case.model_output, case.data, i) for i in range(count)) / count
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    gradients = case.gradients(result.loss)
    for mine, exact in zip(gradients, case.gradients(expected), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-12)
    assert any(gradient.any() for gradient in gradients)
    assert all(not v.requires_grad for v in result.metrics.values())


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("sizes", [(2,) * 6, (4, 8), (6, 2, 4)])
def test_any_split_into_micro_batches_gives_the_same_update(name, sizes):
    case = FORMULAS[name][0]()
    assert sum(sizes) == ROWS
    whole = case.run().loss
    parts, start = 0.0, 0
    for size in sizes:
        parts = parts + case.run(slice(start, start + size)).loss * size / ROWS
        start += size
    torch.testing.assert_close(parts, whole, rtol=1e-12, atol=1e-14)
    for split, together in zip(case.gradients(parts), case.gradients(whole), strict=True):
        torch.testing.assert_close(split, together, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard"])
def test_odd_splits_and_single_rows_add_up_too(name):
    case = policy_gradient_case(name, clip_ratio=0.2)
    parts = sum(case.run(slice(i, i + 1)).loss for i in range(ROWS)) / ROWS
    torch.testing.assert_close(parts, case.run().loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["flow_grpo", "grpo_guard", "flow_dppo", "tempflow_grpo", "flash_grpo"])
def test_rollout_weights_scale_rows_and_carry_no_gradient(name):
    case = policy_gradient_case(name, weights=True, clip_ratio=0.2)
    weights = case.data["rollout_is_weights"].requires_grad_()
    assert (weights == 0).any() and (weights > 0).any()
    loss = case.run().loss
    rows = torch.stack([case.run(slice(i, i + 1)).loss for i in range(ROWS)])
    torch.testing.assert_close(loss, rows.mean())
    case.data.pop("rollout_is_weights")
    unweighted = torch.stack([case.run(slice(i, i + 1)).loss for i in range(ROWS)])
    torch.testing.assert_close(rows, unweighted * weights.detach())
    assert torch.autograd.grad(loss, weights, allow_unused=True) == (None,)


def test_cases_lie_on_both_sides_of_every_bound():
    for name in ("flow_grpo", "grpo_guard"):
        metrics = FORMULAS[name][0]().run().metrics
        assert 0 < metrics["pg_clipfrac_lower"] < 1 and 0 < metrics["pg_clipfrac_higher"] < 1
    assert 0 < FORMULAS["dgpo"][0]().run().metrics["pg_clipfrac"] < 1
    assert 0 < FORMULAS["flow_dppo"][0]().run().metrics["dppo_masked_frac"] < 1
    advantages = FORMULAS["diffusion_nft"][0]().data["advantages"].abs()
    assert (advantages < 2).any() and (advantages > 2).any()


@pytest.mark.parametrize("coef", [None, 0.3])
def test_a_teacher_beside_another_loss_adds_its_divergence(coef):
    case = policy_gradient_case("grpo_guard", loss_mode="grpo_guard", clip_ratio=0.2)
    case.config.teacher.coef, weight = coef, 1.0 if coef is None else coef
    result = build_loss_function(case.config)(case.model_output, case.data)
    rows = [
        cases.grpo_guard_row(case.model_output, case.data, i, 0.2, 0.2)
        + weight * cases.opd_row(case.model_output, case.data, i)
        for i in range(ROWS)
    ]
    expected = sum(rows) / ROWS
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    for mine, exact in zip(case.gradients(result.loss), case.gradients(expected), strict=True):
        torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-12)
    assert result.metrics["teacher_kl"] > 0


def test_first_update_has_ratio_one_and_the_plain_policy_gradient():
    log_prob = torch.randn(5, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0, 3.0, 9.0], dtype=torch.float64)
    loss, metrics = FlowGRPOLoss.compute_loss(
        old_log_prob=log_prob.detach(), log_prob=log_prob, advantages=advantages, config=actor_config()
    )
    assert metrics["ratio_max_dev"] == 0 and metrics["ppo_kl"] == 0 and metrics["pg_clipfrac"] == 0
    (gradient,) = torch.autograd.grad(loss, log_prob)
    torch.testing.assert_close(gradient, -advantages.clamp(-5, 5) / 5)


def test_clip_metrics_count_what_lies_outside_the_bounds():
    ratio = torch.tensor([0.7, 0.95, 1.0, 1.15, 1.3, 2.0])
    _, metrics = FlowGRPOLoss.compute_loss(
        old_log_prob=torch.zeros(6),
        log_prob=ratio.log(),
        advantages=torch.ones(6),
        config=actor_config(clip_ratio=0.1, clip_ratio_high=0.2),
    )
    assert metrics["pg_clipfrac_lower"] == pytest.approx(1 / 6)
    assert metrics["pg_clipfrac_higher"] == pytest.approx(2 / 6)
    assert metrics["pg_clipfrac"] == pytest.approx(3 / 6)
    assert metrics["ratio_max_dev"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.mean()))
    assert metrics["ppo_kl"] == pytest.approx(float(-ratio.log().mean()))


def test_clipped_rows_have_no_gradient():
    log_prob = torch.tensor([0.5, 0.5, -0.5, -0.5], requires_grad=True)
    loss, _ = FlowGRPOLoss.compute_loss(
        old_log_prob=torch.zeros(4),
        log_prob=log_prob,
        advantages=torch.tensor([1.0, -1.0, 1.0, -1.0]),
        config=actor_config(clip_ratio=0.1),
    )
    (gradient,) = torch.autograd.grad(loss, log_prob)
    assert (gradient != 0).tolist() == [False, True, True, False]


@pytest.mark.parametrize("kind", ["sde", "dance_sde"])
def test_guard_takes_the_quadratic_term_out_of_a_gaussian_steps_log_ratio(kind):
    """(Δlogp + b)·c = mean((x'-μ_old)·Δμ)/c, linear in Δμ, on steps as the rollout makes them."""
    scheduler = FlowMatchSDEDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(10)
    x, v, dv = (torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(i)) for i in range(3))
    t = scheduler.timesteps[[1, 3, 6, 8]]
    stored, old_log_prob, old_mean, std_dev_t = scheduler.sample_previous_step(x, v, t, sde_type=kind)
    _, log_prob, mean, _ = scheduler.sample_previous_step(x, v + 0.05 * dv, t, prev_sample=stored, sde_type=kind)
    c = std_dev_t.flatten() * scheduler.sqrt_neg_dt(t)
    linear = ((stored - old_mean) * (mean - old_mean)).flatten(1).mean(1) / c
    loss, metrics = GRPOGuardLoss.compute_loss(
        old_log_prob=old_log_prob,
        log_prob=log_prob,
        advantages=-torch.ones(4),
        config=actor_config(clip_ratio=10.0),
        old_prev_sample_mean=old_mean,
        prev_sample_mean=mean,
        std_dev_t=std_dev_t,
        sqrt_dt=scheduler.sqrt_neg_dt(t),
    )
    torch.testing.assert_close(metrics["ratio_mean"], linear.exp().mean(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, (linear.exp() / scheduler.sqrt_neg_dt(t) ** 2).mean(), rtol=1e-3, atol=1e-3)
    assert metrics["guard_bias"] > 0


def test_guard_accepts_scalars_for_a_batch_of_one_step():
    case = policy_gradient_case("grpo_guard", clip_ratio=0.1)
    m, d = case.model_output, case.data
    shared = dict(
        old_log_prob=d["old_log_probs"],
        log_prob=m["log_probs"],
        advantages=d["advantages"],
        config=case.config,
        old_prev_sample_mean=d["old_prev_sample_mean"],
        prev_sample_mean=m["prev_sample_mean"],
    )
    scalar = GRPOGuardLoss.compute_loss(std_dev_t=torch.tensor(0.5), sqrt_dt=torch.tensor(0.3), **shared)[0]
    full = torch.full((ROWS,), 1.0, dtype=torch.float64)
    rows = GRPOGuardLoss.compute_loss(std_dev_t=(0.5 * full)[:, None, None, None], sqrt_dt=0.3 * full, **shared)[0]
    torch.testing.assert_close(scalar, rows)


def test_dppo_holds_back_only_what_is_far_and_moves_further():
    ratio = torch.tensor([1.2, 0.8, 1.2, 0.8, 1.2, 1.0])
    drift = torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-4, 1.0])  # the fifth is near the old policy
    _, metrics = FlowDPPOLoss.compute_loss(
        old_log_prob=torch.zeros(6),
        log_prob=ratio.log(),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0, 1.0]),
        config=actor_config(extra={"kl_mask_threshold": 1e-3}),
        old_prev_sample_mean=torch.zeros(6, 2, 2),
        prev_sample_mean=drift[:, None, None].expand(6, 2, 2),
        std_dev_t=torch.ones(6, 1, 1),
        sqrt_dt=torch.ones(6),
    )
    assert metrics["dppo_masked_frac"] == pytest.approx(2 / 6)  # rows 0 and 3


def test_kl_equals_its_formula_and_has_a_gradient():
    case = policy_gradient_case("flow_grpo")
    mean, s = case.model_output["prev_sample_mean"], case.model_output["std_dev_t"]
    ref = case.data["old_prev_sample_mean"]
    loss, metrics = KLLoss.compute_loss(prev_sample_mean=mean, ref_prev_sample_mean=ref, std_dev_t=s)
    expected = sum(((mean[i] - ref[i]) ** 2).mean() / (2 * float(s[i]) ** 2) for i in range(ROWS)) / ROWS
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, mean)
    torch.testing.assert_close(gradient, (mean - ref).detach() / (s**2 * ROWS * ref[0].numel()))
    assert metrics["kl_loss"] == loss and not metrics["kl_loss"].requires_grad
    # with one s for all, as documented
    scalar, _ = KLLoss.compute_loss(prev_sample_mean=mean, ref_prev_sample_mean=ref, std_dev_t=torch.tensor(0.5))
    torch.testing.assert_close(scalar, ((mean - ref) ** 2).mean() * 2)
    # with the divisor of the step's authors
    other, _ = KLLoss.compute_loss(prev_sample_mean=mean, ref_prev_sample_mean=ref, std_dev_t=s, kl_std=s / 2)
    torch.testing.assert_close(other, 4 * loss)


def test_kl_and_teacher_beside_a_loss_count_latents_as_log_probabilities_do():
    case = policy_gradient_case("flow_grpo", shares=True, clip_ratio=0.2)
    case.config.diffusion_loss.loss_mode, case.config.use_kl_loss, case.config.kl_loss_coef = "flow_grpo", True, 0.5
    case.config.teacher.coef = 0.3
    m, d = case.model_output, case.data
    d["ref_prev_sample_mean"] = d["old_prev_sample_mean"]
    result = build_loss_function(case.config)(m, d)
    squared = (m["prev_sample_mean"] - d["ref_prev_sample_mean"]) ** 2
    rows = [
        cases.flow_grpo_row(m, d, i, 0.2, 0.2)
        + 0.5 * cases.shared_mean(d, i, squared[i]) / (2 * float(m["std_dev_t"][i]) ** 2)
        + 0.3 * cases.opd_row(m, d, i)
        for i in range(ROWS)
    ]
    torch.testing.assert_close(result.loss, sum(rows) / ROWS, rtol=1e-10, atol=1e-12)


def test_kl_is_called_with_the_engines_names():
    case = policy_gradient_case("flow_grpo")
    data = {"ref_prev_sample_mean": case.data["old_prev_sample_mean"]}
    KLLoss().validate_inputs(loss_name="kl", model_output=case.model_output, data=data)
    assert KLLoss()(config=case.config, model_output=case.model_output, data=data).loss > 0


def test_nft_on_the_old_policy_is_advantage_weighted_matching():
    """Where v = v_old the gradient is A·∇L for any β: the two implicit policies coincide and differ in sign only."""
    for beta in (0.1, 0.5, 1.0):
        case = direct_preference_case("diffusion_nft", adv_clip_max=20.0, extra={"beta": beta, "kl_beta": 0.0})
        d, v = case.data, case.model_output["velocity"]
        d["old_velocity"] = v.detach().clone()
        (gradient,) = case.gradients(case.run().loss)
        t = d["sigma"][:, None, None, None]
        x0_hat = (1 - t) * d["clean_latents"] + t * d["noise"] - t * v
        error = x0_hat - d["clean_latents"]
        matching = (error**2).flatten(1).mean(1) / error.detach().abs().flatten(1).mean(1)
        (expected,) = torch.autograd.grad((d["advantages"] * matching).mean(), v)
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_nft_with_full_reward_and_beta_one_is_supervised_flow_matching():
    """r = 1 and β = 1 leave only L⁺ on v itself: t²·(v - (ε - x0))², normalised, c times."""
    case = direct_preference_case("diffusion_nft", adv_clip_max=2.0, extra={"beta": 1.0, "kl_beta": 0.0})
    d, v = case.data, case.model_output["velocity"]
    d["advantages"] = torch.full((ROWS,), 2.0, dtype=torch.float64)
    error = (d["sigma"][:, None, None, None] * (v - (d["noise"] - d["clean_latents"]))).flatten(1)
    expected = (2.0 * (error**2).mean(1) / error.detach().abs().mean(1)).mean()
    torch.testing.assert_close(case.run().loss, expected)


def test_a_weight_on_an_anchor_asks_for_its_velocity():
    for name, settings, key in (
        ("diffusion_nft", {}, "ref_velocity"),
        ("awm", {"extra": {"kl_beta": 0.1}}, "ref_velocity"),
        ("awm", {"extra": {"ema_kl_beta": 0.1}}, "ema_velocity"),
    ):
        case = direct_preference_case(name, **settings)
        assert key in get_diffusion_loss_fn(name).data_keys(case.config)
        del case.data[key]
        with pytest.raises(ValueError, match=f"needs {key} in the batch"):
            case.run()
    without = direct_preference_case("diffusion_nft", extra={"kl_beta": 0.0})
    assert "ref_velocity" not in get_diffusion_loss_fn("diffusion_nft").data_keys(without.config)
    del without.data["ref_velocity"]
    assert torch.isfinite(without.run().loss)


def test_dpo_metrics_and_pair_checks():
    case = direct_preference_case("dpo")
    assert DPOLoss.rows_per_unit == 2
    better = case.data["noise"] - case.data["clean_latents"]
    case.data["ref_velocity"] = better + 0.1
    chosen = case.data["preference"][:, None, None, None] > 0
    case.model_output["velocity"] = torch.where(chosen, better, better + 0.5)
    result = case.run()
    assert result.metrics["implicit_accuracy"] == 1 and result.metrics["implicit_margin"] > 0
    assert result.loss < 1e-3
    with pytest.raises(ValueError, match="11 rows are no whole number of pairs"):
        case.run(slice(0, 11))
    with pytest.raises(ValueError, match=r"preference \+1 in one and -1"):
        case.run(slice(1, 11))
    case.data["sigma"] = torch.rand(ROWS)
    with pytest.raises(ValueError, match="one sigma"):
        case.run()


def test_missing_inputs_are_named():
    case = policy_gradient_case("grpo_guard")
    del case.data["sqrt_dt"], case.model_output["std_dev_t"]
    with pytest.raises(
        ValueError, match='loss "grpo_guard" needs std_dev_t in its model output, which holds: log_probs'
    ):
        case.run()
    case = policy_gradient_case("grpo_guard")
    del case.data["sqrt_dt"], case.data["advantages"]
    with pytest.raises(ValueError, match="needs advantages, sqrt_dt in its data, which holds: old_log_probs"):
        case.run()


def test_shapes_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match=r"log_prob \(4,\), advantages \(4, 1\)"):
        FlowGRPOLoss.compute_loss(
            old_log_prob=torch.zeros(4), log_prob=torch.zeros(4), advantages=torch.zeros(4, 1), config=actor_config()
        )


def test_unknown_settings_are_named():
    with pytest.raises(
        ValueError, match='extra setting of FlowDPPOLoss "kl_threshold": did you mean "kl_mask_threshold"'
    ):
        policy_gradient_case("flow_dppo", extra={"kl_threshold": 1.0}).run()
    with pytest.raises(ValueError, match='unknown diffusion_loss.extra.weighting "hubber": did you mean "huber"'):
        direct_preference_case("awm", extra={"weighting": "hubber"}).run()


def test_losses_take_a_tensordict():
    from tensordict import TensorDict

    case = policy_gradient_case("flow_grpo", clip_ratio=0.2)
    data = TensorDict(case.data, batch_size=[ROWS])
    loss_fn = get_diffusion_loss_fn("flow_grpo")
    loss_fn.validate_inputs(loss_name="flow_grpo", model_output=case.model_output, data=data)
    result = loss_fn(config=case.config, model_output=case.model_output, data=data)
    assert result.loss == case.run().loss


def test_a_loss_is_fed_by_the_names_of_its_parameters():
    class Plain(DiffusionLossFn):
        required_model_output_keys = ("log_probs",)

        @classmethod
        def compute_loss(cls, *, log_prob, sqrt_dt, rollout_is_weights=None):
            return log_prob.sum() + sqrt_dt.sum(), {"weights": rollout_is_weights}

    class Longer(Plain):
        @classmethod
        def compute_loss(cls, *, advantages, config, **plain):
            loss, metrics = super().compute_loss(**plain)
            return loss + advantages.sum(), {**metrics, "config": config}

    output = {"log_probs": torch.ones(2), "velocity": torch.zeros(2)}
    # a tensor of the batch never takes the place of an output that the loss requires
    data = {key: torch.full((2,), v) for key, v in {"log_probs": 50.0, "sqrt_dt": 10.0, "advantages": 100.0}.items()}
    assert Plain()(config="c", model_output=output, data=data).loss == 22
    result = Longer()(config="c", model_output=output, data={**data, "rollout_is_weights": torch.ones(2)})
    assert result.loss == 222 and result.metrics["config"] == "c" and result.metrics["weights"].tolist() == [1, 1]


def test_parts_with_steps_of_their_own_count_as_they_would_alone():
    """Three entries of a latent with one std, five with another: each part's divergence, by its share of the latent."""
    generator, parts = torch.Generator().manual_seed(0), torch.tensor([3, 5])
    mean, other = (torch.randn(4, 8, 2, generator=generator) for _ in range(2))
    std, sqrt_dt = (torch.rand(4, 2, generator=generator) + 0.1 for _ in range(2))
    each = {"std_dev_t": std.repeat_interleave(parts, 1)[..., None], "sqrt_dt": sqrt_dt.repeat_interleave(parts, 1)}
    squared = torch.stack([part.pow(2).mean((1, 2)) for part in (mean - other).split(parts.tolist(), 1)], 1)
    exact = (squared / (2 * (std * sqrt_dt) ** 2) * parts / 8).sum(1)
    given, opd = {"prev_sample_mean": mean, "teacher_prev_sample_mean": other, **each}, get_diffusion_loss_fn("opd")
    distance, _ = opd.compute_loss(**given)
    torch.testing.assert_close(distance, exact.mean())
    kl, _ = KLLoss.compute_loss(prev_sample_mean=mean, ref_prev_sample_mean=other, std_dev_t=each["std_dev_t"])
    torch.testing.assert_close(kl, (squared / (2 * std**2) * parts / 8).sum(1).mean())
    weights = torch.tensor([0.5 / 3, 0.5 / 5]).repeat_interleave(parts) * 8
    distance, _ = opd.compute_loss(log_prob_weights=weights.expand(4, -1), **given)
    torch.testing.assert_close(distance, (squared / (2 * (std * sqrt_dt) ** 2)).mean(1).mean())

    log_prob, given = torch.zeros(4), {"config": actor_config(), "prev_sample_mean": mean, **each}
    given |= {"log_prob": log_prob, "advantages": torch.ones(4), "old_prev_sample_mean": other}
    _, metrics = FlowDPPOLoss.compute_loss(old_log_prob=log_prob, **given)
    torch.testing.assert_close(metrics["dppo_kl"], exact.mean())
    _, metrics = GRPOGuardLoss.compute_loss(old_log_prob=log_prob, **given)
    torch.testing.assert_close(metrics["guard_bias"], exact.mean())


def test_nft_takes_the_levels_of_parts():
    generator = torch.Generator().manual_seed(0)
    names = ("velocity", "old_velocity", "clean_latents", "noise")
    given = {name: torch.randn(4, 8, 2, generator=generator) for name in names}
    nft = get_diffusion_loss_fn("diffusion_nft")
    given |= {"advantages": torch.randn(4, generator=generator), "config": actor_config(extra={"kl_beta": 0.0})}
    sigma = torch.rand(4, generator=generator)
    plain, _ = nft.compute_loss(sigma=sigma, **given)
    same, _ = nft.compute_loss(sigma=sigma, levels=sigma[:, None].expand(-1, 8), **given)
    other, _ = nft.compute_loss(sigma=sigma, levels=sigma[:, None] * torch.linspace(0.2, 1, 8), **given)
    assert torch.equal(plain, same) and not torch.isclose(plain, other)
