"""What must not change an update: the micro-batch size and gradient checkpointing. And what changes it a little."""

import functools

import pytest
import torch
from engine_cases import (
    add_reference,
    assert_same,
    gradients,
    loss_function,
    make_engine,
    model_config,
    moved,
    part,
    roll_out,
    update,
    weights,
)
from tiny_models import tiny_checkpoint


@functools.cache
def batch(lora: bool):
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True, lora=lora))
    engine.keep_reference()
    data = roll_out(engine, per_prompt=3)
    add_reference(engine, data)
    return data, weights(engine)


def updated(lora: bool, micro_batch_size: int = 18, fsdp: dict | None = None, data: dict | None = None, **model):
    """Weights and metrics after two optimizer steps on the same batch (18 pairs)."""
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True, lora=lora, **model), **(fsdp or {}))
    engine.micro_batch_size = micro_batch_size
    metrics = update(engine, data or batch(lora)[0], loss_function(kl=0.1))
    return weights(engine), metrics


@functools.cache
def plain(lora: bool):
    return updated(lora)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_any_micro_batch_size_gives_the_same_update(lora, size):
    expected, expected_metrics = plain(lora)
    got, metrics = updated(lora, size)
    assert moved(expected, batch(lora)[1]) > 5e-4
    assert_same(expected, got)
    for one, other in zip(expected_metrics, metrics, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def rejecting(*rejected: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The batch without these samples, or (sample, step)s. What they hold is far off, so that it would be seen."""
    data = {k: v.clone() for k, v in batch(True)[0].items()}
    kept = torch.ones(data["all_timesteps"].shape, dtype=torch.bool)
    for pair in rejected:
        kept[pair] = False
        data["advantages"][pair] = 50.0
        data["ref_prev_sample_mean"][pair] += 50.0
    return data | {"share": kept / kept.sum().double()}


def test_samples_that_are_rejected_might_as_well_not_have_been_drawn():
    """Neither the loss, nor the KL term, nor the divisor, nor a metric knows of them."""
    found, metrics = updated(True, 5, data=rejecting((1,), (4,)))
    expected, known = updated(True, data=part(batch(True)[0], [0, 2, 3, 5]))
    assert moved(expected, batch(True)[1]) > 5e-4 and known[1]["kl_loss"] > 0
    assert_same(expected, found)
    for one, other in zip(known, metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("size", [1, 4])
def test_with_rejected_steps_any_micro_batch_size_gives_the_same_update(size):
    rejected = [(0, 0), (0, 1), (0, 2), (1, 0), (3, 2)]  # of the first four pairs none is left
    (expected, known), (found, metrics) = (updated(True, n, data=rejecting(*rejected)) for n in (18, size))
    assert moved(expected, plain(True)[0]) > 1e-5
    assert_same(expected, found)
    for one, other in zip(known, metrics, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradient_checkpointing_changes_nothing(lora):
    assert_same(plain(lora)[0], updated(lora, enable_gradient_checkpointing=True)[0])


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_mixed_precision_stays_close(lora):
    """The tiny model has large random weights: diffusers' own bfloat16 forward is off by a fifth of the velocity."""
    config = model_config(tiny_checkpoint(), lora=lora)
    data, loss = roll_out(make_engine(config)), loss_function(clip=10.0)  # unclipped, so that rounding flips nothing
    found = []
    for dtype in (None, "bfloat16"):
        engine = make_engine(config, dtype=dtype)
        start = weights(engine)
        with engine.train_mode():
            engine.forward_backward_batch(data, loss)
            found.append(torch.cat([g.flatten() for g in gradients(engine).values()]))
            assert engine.train_batch(data, loss)["metrics"]["ratio_mean"] == pytest.approx(1, abs=0.1)
        assert all(w.dtype == torch.float32 for w in weights(engine).values())
        assert moved(weights(engine), start) > 1e-4
    assert not torch.equal(*found)
    assert torch.nn.functional.cosine_similarity(*found, dim=0) > 0.85


def test_only_the_conditional_half_has_a_gradient():
    data = {k: v.clone() for k, v in batch(False)[0].items()}
    data["prompt_embeds"].requires_grad_()
    data["negative_prompt_embeds"].requires_grad_()
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True))
    with engine.train_mode():
        engine.forward_backward_batch(data, loss_function(kl=0.1))
    assert data["prompt_embeds"].grad.abs().max() > 0
    assert data["negative_prompt_embeds"].grad is None


def test_a_gradient_that_is_not_finite_stops_the_run():
    data = {k: v.clone() for k, v in batch(False)[0].items()}
    data["advantages"][0, 0] = float("nan")
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True))
    before = weights(engine)
    with engine.train_mode(), pytest.raises(FloatingPointError, match="actor_rollout_ref.actor.optim.lr"):
        engine.train_batch(data, loss_function(kl=0.1))
    assert_same(before, weights(engine), atol=0)
