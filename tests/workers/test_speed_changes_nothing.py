"""Each thing that makes a step faster, on and off: the same samples and the same weights, to 1e-5 in float32."""

import functools

import pytest
import torch
from engine_cases import (
    add_reference,
    assert_same,
    loss_function,
    make_engine,
    make_rollout,
    model_config,
    roll_out,
    update,
    weights,
)
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine import base
from verl_omni.workers.engine.compile.blocks import compile_blocks


def config(lora: bool = True):
    return model_config(tiny_checkpoint(), cfg=True, lora=lora)


FULL = pytest.param(False, id="full", marks=pytest.mark.slow)


@pytest.mark.parametrize("lora", [FULL, pytest.param(True, id="lora")])
def test_compiled_blocks(lora, monkeypatch):
    """Traced and differentiated ahead of time as on a GPU; the kernels are those of eager mode.

    Without weight decay: what no output depends on (the last block's text) has no gradient in eager mode and one of 0
    here, so that decay would move it here alone.
    """
    data = roll_out(make_engine(config(lora)))
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        monkeypatch.setattr(base, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager"))
        engine = make_engine(config(lora), optim={"weight_decay": 0.0}, use_torch_compile=compiled)
        assert engine.rounds_like_rollout != compiled
        update(engine, data, loss_function())
        found.append(weights(engine))
    assert_same(*found)


def test_folded_lora():
    engine = make_engine(config(), fold_lora=True)
    plain = roll_out(engine, keep_uncond=True)
    frozen = {name: p.clone() for name, p in engine.module.named_parameters()}
    with engine.whole():
        folded = roll_out(engine, keep_uncond=True)
        changed = {name for name, p in engine.module.named_parameters() if not torch.equal(p, frozen[name])}

    assert changed and all("base_layer.weight" in name for name in changed)
    assert_same(plain, folded)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(parameter, frozen[name]), name
    update(engine, folded, loss_function())
    other = make_engine(config())
    update(other, plain, loss_function())
    assert_same(weights(other), weights(engine))


def test_two_copies_on_the_device_or_none():
    assert make_engine(config(), param_offload=True).folded_lora is None
    with pytest.raises(ValueError, match="fold_lora=true keeps two copies .* set one of them to false"):
        make_engine(config(), fold_lora=True, param_offload=True)


def test_the_rollouts_own_unconditional_half():
    data = roll_out(make_engine(config()), keep_uncond=True)
    found, calls = [], []
    for reuse in (True, False):
        engine = make_engine(config())
        engine.module.register_forward_pre_hook(lambda *_: calls.append(1))
        given = data if reuse else {k: v for k, v in data.items() if k != "uncond_velocity"}
        update(engine, given, loss_function(), steps=1)
        found.append(weights(engine))
        calls.append(None)
    assert_same(*found)
    once, twice = (calls[: calls.index(None)], calls[calls.index(None) + 1 : -1])
    assert 2 * len(once) == len(twice) > 0


def test_both_halves_of_cfg_in_one_forward():
    found, calls = [], []
    for one_forward in (True, False):
        engine = make_engine(config())
        hook = engine.module.register_forward_pre_hook(lambda *_: calls.append(1))
        rollout = make_rollout(engine, cfg_in_one_forward=one_forward)
        data = roll_out(engine, texts=["bright", "purple"], rollout=rollout)  # as long as the negative prompt
        hook.remove()
        calls.append(None)
        update(engine, data, loss_function())
        found.append((data, weights(engine)))
    for one, two in zip(*found, strict=True):
        assert_same(one, two)
    once, twice = (calls[: calls.index(None)], calls[calls.index(None) + 1 : -1])
    assert 2 * len(once) == len(twice) > 0


def test_old_log_probabilities_from_the_training_graph():
    data, found = roll_out(make_engine(config())), []
    for on_policy in (False, True):
        engine, loss = make_engine(config()), loss_function()
        loss.on_policy = on_policy
        metrics = update(engine, data, loss, steps=1)
        assert metrics[0]["ratio_max_dev"] <= (0 if on_policy else 1e-6)
        found.append(weights(engine))
    assert_same(*found)


def test_the_references_own_micro_batch_size():
    engine = make_engine(config(lora=False))
    engine.keep_reference(offload=True)
    data = roll_out(engine)
    update(engine, data, loss_function())
    add_reference(engine, data)
    with engine.eval_mode(), engine.policy("reference"):
        mean = engine.infer_batch(data, micro_batch_size=1)["model_output"]["prev_sample_mean"]
    torch.testing.assert_close(mean, data["ref_prev_sample_mean"].flatten(0, 1), atol=1e-5, rtol=0)
