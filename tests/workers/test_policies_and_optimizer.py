"""Reference, moving average, learning rate, clipping, and weights that other tools load."""

import math
import re

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from engine_cases import (
    NEGATIVE,
    PROMPTS,
    SEQUENCE,
    SIZE,
    STEPS,
    assert_same,
    loss_function,
    make_engine,
    make_rollout,
    model_config,
    moved,
    requests,
    roll_out,
    update,
    weights,
)
from tiny_models import tiny_checkpoint

from verl_omni.config import OptimizerConfig
from verl_omni.workers.engine.optimizer import lr_factor
from verl_omni.workers.engine.registry import REPLAYS


def means(engine, data) -> torch.Tensor:
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]["prev_sample_mean"]


def test_the_check_before_a_run_knows_what_a_loss_is_given():
    engine = make_engine(model_config(tiny_checkpoint()))
    with engine.eval_mode():
        given = engine.infer_batch(roll_out(engine))["model_output"]
    assert given.keys() == REPLAYS["policy_gradient"].outputs


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_reference_is_the_starting_model_after_any_update(lora):
    """Full: the weights that training started from. LoRA: the base model, without its adapters."""
    base = make_engine(model_config(tiny_checkpoint(), cfg=True))
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True, lora=lora))
    engine.keep_reference()
    data = roll_out(engine)
    update(engine, data, loss_function())
    trained = weights(engine)
    with engine.policy("reference"):
        reference = means(engine, data)
    torch.testing.assert_close(reference, means(base, data), atol=1e-6, rtol=0)
    assert (means(engine, data) - reference).abs().max() > 1e-3
    assert_same(trained, weights(engine), atol=0)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_moving_average_is_the_one_kept_by_hand(lora):
    decay = 0.7
    engine = make_engine(model_config(tiny_checkpoint(), lora=lora))
    engine.keep_ema(decay)
    data = roll_out(engine)
    average = {name: w.double() for name, w in weights(engine).items()}
    for _ in range(3):
        update(engine, data, loss_function(), steps=1)
        current = weights(engine)
        average = {name: decay * average[name] + (1 - decay) * current[name].double() for name in average}
    with engine.policy("ema"):
        assert_same(average, weights(engine), atol=1e-6)
        seen = means(engine, data)
    assert moved(average, current) > 1e-4
    assert_same(current, weights(engine), atol=0)
    assert (means(engine, data) - seen).abs().max() > 1e-4


def test_a_policy_is_put_back_after_an_error():
    engine = make_engine(model_config(tiny_checkpoint(), lora=True))
    engine.policies.keep("old")
    update(engine, roll_out(engine), loss_function(), steps=1)
    trained = weights(engine)
    for name in ("old", "reference"):
        with pytest.raises(KeyError), engine.policy(name):
            raise KeyError
        assert_same(trained, weights(engine), atol=0)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", [1 / 3, 2 / 3, 1] + [(1 + math.cos(math.pi * x / 4)) / 2 for x in range(5)] + [0]),
    ],
)
def test_learning_rates_in_closed_form(kind, expected):
    """Three steps of warm-up, seven in all: (step + 1) / 3, then the decay over the four that are left."""
    config = OptimizerConfig(lr_scheduler_type=kind, lr_warmup_steps=3, total_training_steps=7)
    factor = lr_factor(config)
    assert [factor(step) for step in range(9)] == pytest.approx(expected, abs=1e-12)


def test_the_learning_rate_of_each_step_is_reported_and_used():
    optim = {"optimizer": "SGD", "lr": 0.5, "weight_decay": 0.0, "clip_grad": 1e-3, "lr_warmup_steps": 2}
    engine = make_engine(model_config(tiny_checkpoint()), optim)
    data, sizes, rates = roll_out(engine), [], []
    for _ in range(3):
        before = weights(engine)
        rates += [m["lr"] for m in update(engine, data, loss_function(clip=10.0), steps=1)]
        after = weights(engine)
        sizes.append(math.sqrt(sum((after[n] - before[n]).double().square().sum().item() for n in after)))
    assert rates == pytest.approx([0.25, 0.5, 0.5])
    # SGD moves by rate * gradient, and the gradient's norm is the clip.
    assert sizes == pytest.approx([rate * 1e-3 for rate in rates], rel=1e-2)


def test_a_gradient_that_is_no_number_is_named_and_not_taken():
    engine = make_engine(model_config(tiny_checkpoint()))
    (_, other), (name, parameter) = list(engine.parameters.items())[2:4]
    other.grad, before = torch.full_like(other, torch.inf), weights(engine)
    parameter.grad = torch.full_like(parameter, torch.nan)
    told = rf"is nan, in 2 of \d+ parameters, the last of them {re.escape(name)}: .*kernel"
    with pytest.raises(FloatingPointError, match=told):
        engine.optimizer_step()
    assert_same(before, weights(engine))
    other.grad, parameter.grad = None, torch.full_like(parameter, 1e38)  # each is one, their sum of squares is not
    with pytest.raises(FloatingPointError, match="is inf: the update") as raised:
        engine.optimizer_step()
    assert "kernel" not in str(raised.value)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_fused_step_is_the_same_step(optimizer):
    config = model_config(tiny_checkpoint())
    data = roll_out(make_engine(config))
    engines = [make_engine(config, {"optimizer": optimizer, "lr": 1e-3, "fused": fused}) for fused in (False, True)]
    for engine in engines:
        update(engine, data, loss_function())
    assert [engine.optimizer.defaults["fused"] for engine in engines] == [False, True]
    assert_same(*map(weights, engines))


def test_an_optimizer_that_has_no_fused_step():
    config = model_config(tiny_checkpoint())
    make_engine(config, {"optimizer": "NAdam"})
    with pytest.raises(ValueError, match="optim.fused=true: torch has no fused NAdam"):
        make_engine(config, {"optimizer": "NAdam", "fused": True})


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1e6])
def test_gradients_are_clipped_to_the_limit(clip):
    optim = {"optimizer": "SGD", "lr": 1.0, "weight_decay": 0.0, "clip_grad": clip}
    engine = make_engine(model_config(tiny_checkpoint()), optim)
    before = weights(engine)
    (metrics,) = update(engine, roll_out(engine), loss_function(), steps=1)
    after = weights(engine)
    size = math.sqrt(sum((after[n] - before[n]).double().square().sum().item() for n in after))
    assert metrics["grad_norm"] > 1e-2
    assert size == pytest.approx(min(metrics["grad_norm"], clip or math.inf), rel=1e-2)


def validation_image(engine) -> torch.Tensor:
    """As validation draws it: the ODE, no trajectory."""
    rollout = make_rollout(engine)
    with engine.eval_mode():
        (output,) = rollout.run_batch(requests(rollout, PROMPTS[1:], first_seed=42, noise_level=0.0))
    return output.image


def plain_image(pipe) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    image = pipe(
        prompt=PROMPTS[1],
        negative_prompt=NEGATIVE,
        true_cfg_scale=4.0,
        height=SIZE,
        width=SIZE,
        num_inference_steps=STEPS,
        max_sequence_length=SEQUENCE,
        generator=torch.Generator().manual_seed(42),
        output_type="np",
    ).images[0]
    return torch.from_numpy((image * 255).round()).permute(2, 0, 1).to(torch.uint8)


@pytest.mark.parametrize("decay", [0.0, 0.5], ids=["trained", "average"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_plain_pipeline_draws_what_validation_drew(lora, decay, tmp_path, monkeypatch):
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True, lora=lora), {"lr": 0.05})
    if decay:
        engine.keep_ema(decay)
    update(engine, roll_out(engine), loss_function(clip=10.0))
    engine.save_checkpoint(str(tmp_path))
    with engine.policy("ema" if decay else "current"):
        ours = validation_image(engine)

    pipe = QwenImagePipeline.from_pretrained(tiny_checkpoint())
    before = plain_image(pipe)
    if lora:
        monkeypatch.setattr("diffusers.loaders.lora_base.HF_HUB_OFFLINE", False)  # the folder alone has to do
        pipe.load_lora_weights(str(tmp_path / "export"))
    else:
        pipe.transformer = QwenImageTransformer2DModel.from_pretrained(tmp_path / "export" / "transformer")
    after = plain_image(pipe)
    assert (after.int() - before.int()).abs().float().mean() > 2
    assert (after.int() - ours.int()).abs().max() <= 1
    if decay:
        assert (validation_image(engine).int() - ours.int()).abs().max() > 1


def test_a_run_can_start_from_an_exported_lora(tmp_path):
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True, lora=True))
    update(engine, roll_out(engine), loss_function())
    engine.save_checkpoint(str(tmp_path))
    from engine_cases import CheckpointConfig, FSDPConfig, PPODiffusersFSDPEngine

    config = model_config(tiny_checkpoint(), cfg=True, lora=True, lora_path=str(tmp_path / "export"))
    again = PPODiffusersFSDPEngine(config, FSDPConfig(), OptimizerConfig(), CheckpointConfig())
    again.initialize()
    assert_same(weights(engine), weights(again), atol=0)


def test_equal_advantages_make_a_gradient_that_is_exactly_zero():
    """The trainer stops a run by this number."""
    engine = make_engine(model_config(tiny_checkpoint(), lora=True))
    data = roll_out(engine)
    data["advantages"].zero_()
    (metrics,) = update(engine, data, loss_function(), steps=1)
    assert metrics["grad_norm"] == 0.0
