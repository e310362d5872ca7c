"""A published `kl_loss_coef` means here what it meant to its authors: each step's KL divides by what theirs does."""

import math

import pytest
from engine_cases import NOISE, add_reference, loss_function, make_engine, model_config, roll_out, update
from tiny_models import tiny_checkpoint

# d of mean((μ-μ_ref)²)/(2d²), from σ, σ' and the σ after the first step
AUTHORS = {
    "sde": lambda now, after, second: NOISE * math.sqrt(now / (1 - (second if now == 1 else now))),
    "cps": lambda now, after, second: after * math.sin(NOISE * math.pi / 2),
    "dance_sde": lambda now, after, second: NOISE * math.sqrt(now - after),
}


@pytest.mark.parametrize("sde_type", AUTHORS)
def test_the_engines_kl_is_the_authors(sde_type):
    engine = make_engine(model_config(tiny_checkpoint(), sde_type, lora=True))
    data = roll_out(engine)
    add_reference(engine, data)
    shape = data["all_timesteps"].shape
    with engine.eval_mode():
        mean = engine.infer_batch(data)["model_output"]["prev_sample_mean"].unflatten(0, shape)
    squared = ((mean.double() - data["ref_prev_sample_mean"].double()) ** 2).flatten(2).mean(dim=2)
    sigmas = engine.replay.scheduler.sigmas.double().tolist()
    d = [AUTHORS[sde_type](sigmas[i], sigmas[i + 1], sigmas[1]) for i in range(shape[1])]
    expected = sum(squared[:, i].mean().item() / (2 * d[i] ** 2) for i in range(shape[1])) / shape[1]
    assert expected > 1e-6
    (metrics,) = update(engine, data, loss_function(kl=0.1), steps=1)
    assert metrics["kl_loss"] == pytest.approx(expected, rel=1e-5)
