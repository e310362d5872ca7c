"""Before the first update the policy that trains is the policy that sampled: every ratio is 1."""

import dataclasses
import math

import pytest
import torch
from engine_cases import (
    NOISE,
    assert_same,
    loss_function,
    make_engine,
    make_rollout,
    model_config,
    moved,
    requests,
    roll_out,
    weights,
)
from tiny_models import tiny_checkpoint
from verl.protocol import DataProto

from verl_omni.algorithms.registry import Algorithm, register_algorithm
from verl_omni.config import DiffusionActorConfig, DiffusionLossConfig, DiffusionRolloutConfig
from verl_omni.pipelines.qwen_image import QwenImage
from verl_omni.utils.errors import RunError
from verl_omni.workers.diffusion_worker import DiffusionWorker
from verl_omni.workers.first_ratio import check_first_ratio
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.rollout.trajectories import TrajectoryStore


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("sde_type", ["sde", "cps", "dance_sde"])
def test_ratio_is_one_before_the_first_update(sde_type, lora, cfg):
    engine = make_engine(model_config(tiny_checkpoint(), sde_type, cfg, lora))
    data = roll_out(engine)
    assert data["old_log_probs"].abs().min() > 0
    engine.micro_batch_size = 5  # other batches than the rollout's
    with engine.train_mode():
        replayed = engine.infer_batch(data)["model_output"]["log_probs"].view_as(data["old_log_probs"])
        ratio = (replayed.double() - data["old_log_probs"].double()).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-6, rtol=0)
        first, second = (engine.train_batch(data, loss_function())["metrics"] for _ in range(2))
    assert first["ratio_max_dev"] <= 1e-6
    assert second["ratio_max_dev"] > 1e-4


class OwnStep(QwenImage):
    """An adapter with a step formula of its own: plain CFG, and half of the noise, which it judges itself."""

    @classmethod
    def forward_and_sample_previous_step(
        cls, module, scheduler, model_config, model_inputs, negative_model_inputs, scheduler_inputs, step
    ):
        velocity = module(**model_inputs, return_dict=False)[0]
        if negative_model_inputs is not None:
            with torch.no_grad():
                uncond = module(**negative_model_inputs, return_dict=False)[0]
            velocity = uncond + 2.0 * (velocity - uncond)
        sample, x_next = scheduler_inputs["sample"], scheduler_inputs["prev_sample"]
        dt = -(scheduler.sqrt_neg_dt(scheduler_inputs["timestep"]) ** 2)[:, None, None]
        s = torch.full_like(dt, 0.5 * model_config.algo.noise_level)
        mean = sample + dt * velocity
        log_prob = torch.distributions.Normal(mean, (s * (-dt).sqrt()).clamp_min(1e-6)).log_prob(x_next.detach())
        return log_prob.mean(dim=(1, 2)), mean, s


class Worker(DiffusionWorker):
    def __del__(self):
        """The process group is not its own."""


def worker_of(engine, **actor) -> Worker:
    """What updates the engine, without a process of its own."""
    worker = object.__new__(Worker)
    worker.actor_config = DiffusionActorConfig(diffusion_loss=DiffusionLossConfig("flow_grpo"), **actor)
    worker.engine, worker.model_config = engine, engine.model_config
    worker.rollout_config = DiffusionRolloutConfig()
    worker.loss_function = build_loss_function(worker.actor_config)
    worker.trajectories, worker.rollout, worker.anchors = TrajectoryStore(), None, {}
    worker.flop_meter, worker.flops, worker._settled, worker.old_log_probs = None, {}, True, None
    worker._peaks = 0, 0
    return worker


def for_worker(data: dict[str, torch.Tensor]) -> DataProto:
    return DataProto.from_dict(dict(data), meta_info={"num_mini_batches": 2, "epochs": 1})


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
def test_the_rollout_takes_the_adapters_own_step(cfg):
    engine = make_engine(model_config(tiny_checkpoint(), cfg=cfg))
    engine.adapter = OwnStep
    rollout = make_rollout(engine)
    rollout.adapter = OwnStep
    data = roll_out(engine, rollout=rollout, keep_uncond=cfg, keep_means=True)
    metrics = worker_of(engine).update_actor(for_worker(data))
    assert metrics["actor/rollout_ratio_max_dev"] <= 1e-6 and metrics["actor/first_ratio_max_dev"] <= 1e-6
    assert metrics["actor/grad_norm"] > 0
    # what was drawn has the spread that the adapter gave: half of the noise level
    jumps = data["all_latents"][:, 1:] - data["old_prev_sample_mean"]
    roots = engine.replay.scheduler.sqrt_neg_dt(data["all_timesteps"].flatten()).view_as(data["all_timesteps"])
    spread = (jumps / roots[:, :, None, None]).std().item()
    assert spread == pytest.approx(0.5 * NOISE, rel=0.1)


def test_an_own_step_without_noise_and_in_another_window():
    """Windows of one batch may lie at different places: outside of its own a sample draws nothing."""
    engine = make_engine(model_config(tiny_checkpoint()))
    rollout = make_rollout(engine)
    rollout.adapter = OwnStep

    def paths(windows):
        requested = requests(rollout, ["a cat"] * len(windows), keep_trajectory=True)
        for request, window in zip(requested, windows, strict=True):
            request.params |= {"seed": 5, "sde_window": window}
        return [output.trajectory for output in rollout.run_batch(requested)]

    early, late = paths([(0, 2), (1, 3)])
    (alone,) = paths([(1, 3)])
    for name in ("all_latents", "rollout_log_probs", "final_latents"):
        torch.testing.assert_close(late[name], alone[name], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(early["final_latents"], late["final_latents"], atol=1e-2)


@pytest.mark.parametrize(("settings", "loss"), [({}, "flow_grpo"), ({"old_log_probs": "train"}, "grpo_guard")])
def test_a_rollout_that_took_other_steps_is_an_error_before_any_update(settings, loss):
    engine = make_engine(model_config(tiny_checkpoint()))
    data = roll_out(engine, keep_means=True)
    engine.adapter = OwnStep
    before = weights(engine)
    worker = worker_of(engine, **settings)
    worker.actor_config.diffusion_loss.loss_mode = loss
    worker.loss_function = build_loss_function(worker.actor_config)
    with pytest.raises(RunError, match=r"off by [\d.]+, more than .*first_ratio_tolerance=0.001.*forward_and_sample"):
        worker.update_actor(for_worker(data))
    assert_same(before, weights(engine), atol=0)
    worker.actor_config.first_ratio_tolerance = None
    assert worker.update_actor(for_worker(data))["actor/rollout_ratio_max_dev"] > 0.1
    assert moved(before, weights(engine)) > 0


def test_rounding_in_bfloat16_is_no_error():
    """More than any kernel does: the rollout is in float32, and its image has four tokens."""
    data = roll_out(make_engine(model_config(tiny_checkpoint(), cfg=True)))
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True), dtype="bfloat16")
    metrics = worker_of(engine).update_actor(for_worker(data))
    assert metrics["actor/rollout_ratio_max_dev"] > 1e-3 and metrics["actor/first_ratio_max_dev"] == 0


def test_another_policys_samples_are_not_compared():
    engine = make_engine(model_config(tiny_checkpoint()))
    data = roll_out(engine)
    data["old_log_probs"] += 0.5
    worker = worker_of(engine)
    with pytest.raises(RunError, match="off by 0.39"):
        worker.update_actor(for_worker(data))
    register_algorithm(Algorithm(name="test_off_policy", rollout_policy="old"))
    worker.model_config = dataclasses.replace(engine.model_config, algorithm="test_off_policy")
    assert worker.update_actor(for_worker(data))["actor/first_ratio_max_dev"] > 0.3


def test_a_loss_with_a_ratio_of_its_own_is_checked_too():
    check_first_ratio({"ratio_max_dev": 9e-4}, 1e-3, other_kernels=True)
    check_first_ratio({"loss": 1.0}, 1e-3, other_kernels=False)
    with pytest.raises(RunError, match="off by 0.002"):
        check_first_ratio({"ratio_max_dev": 2e-3}, 1e-3, other_kernels=True)
    with pytest.raises(RunError, match="off by inf"):
        check_first_ratio({"ratio_max_dev": math.inf}, 1e-3, other_kernels=False)


def test_log_probs_of_other_software_are_not_those_of_the_policy():
    worker = worker_of(make_engine(model_config(tiny_checkpoint())))
    assert worker._choose_old_log_probs(stale=False).source == "rollout"
    worker.rollout_config = DiffusionRolloutConfig(name="vllm_omni")
    assert worker._choose_old_log_probs(stale=False).source == "train"
    assert worker._choose_old_log_probs(stale=True).source == "recompute"
