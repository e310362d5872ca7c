"""vLLM-Omni draws what diffusers' pipelines and the embedded engine draw, and what training can replay."""

import pytest
import torch
from test_architectures import (
    PROMPTS,
    as_batch,
    config,
    draw,
    picture,
    rollout,
    training_engine,
    upstream,
    without_given,
)
from test_encoded_once import counted, texts
from vllm_cases import ask, assert_same, seen_and_heard

from verl_omni.utils.responses import Latents

# In two batches, and of different lengths; where there are pictures, of different shapes and numbers.
ASKED = [*PROMPTS, "a dog", PROMPTS[1], PROMPTS[0]]


@pytest.mark.parametrize("cfg", [False, True], ids=["plain", "cfg"])
def test_without_noise_it_is_diffusers(served, cfg):
    row, engine = served
    outputs = ask(row, engine, config(row, cfg), PROMPTS, cfg, noise_level=0.0, sde_window=None)
    tolerance = 5e-5 if cfg else 1e-5  # guidance multiplies what two passes differ by
    for i, output in enumerate(outputs):
        latents, made = draw(upstream(row.name), row, i, cfg)
        pixels, sound = (one[0] for one in made) if isinstance(made, tuple) else (made[0], torch.zeros(0))
        both = without_given(output, output.trajectory["final_latents"][None], latents)
        torch.testing.assert_close(*both, atol=tolerance, rtol=1e-5)
        seen, heard = seen_and_heard(output.response)
        assert (seen - pixels * 255).abs().max() < 1
        torch.testing.assert_close(heard, sound.clamp(-1, 1), atol=tolerance, rtol=0)
        assert set(output.trajectory) == {"final_latents", "size", "noise_level"}


# Guidance and the kind of noise do not meet: of one, both; of the other, one.
@pytest.mark.parametrize(
    ("sde_type", "cfg"), [("sde", False), ("sde", True), ("cps", True)], ids=["sde-plain", "sde-cfg", "cps-cfg"]
)
def test_the_same_seeds_give_the_embedded_engines_trajectory(served, cfg, sde_type):
    row, engine = served
    model_config = config(row, cfg, noise=0.7)
    windows = [(i % 2, i % 2 + 2) for i in range(len(ASKED))]
    asked = {"sde_type": sde_type, "sde_window": windows, "init_seed": [7, 7, 7, 1, 2], "keep_means": True}
    mine = ask(row, engine, model_config, ASKED, cfg, **asked)
    theirs = ask(row, rollout(model_config), model_config, ASKED, cfg, **asked)
    for one, other in zip(mine, theirs, strict=True):
        assert_same(one, other)
    assert mine[0].trajectory["rollout_log_probs"].std() > 0


def test_training_finds_the_log_probs_of_the_rollout(served):
    """Of its own distribution of the step, which is not that of the rollout by construction."""
    row, engine = served
    training = training_engine(config(row, cfg=True, noise=0.7))
    data = as_batch(ask(row, engine, training.model_config, ASKED))
    with training.train_mode():
        replayed = training.infer_batch(data)["model_output"]["log_probs"].view_as(data["rollout_log_probs"])
    torch.testing.assert_close(replayed, data["rollout_log_probs"], atol=1e-5, rtol=0)


def test_a_burst_is_drawn_in_full_batches(served):
    row, engine = served
    transformer, rows = engine.engine.pipeline.transformer, []
    counted = "timestep" if not row.name.startswith("ZImage") else None

    def count(module, args, kwargs):
        rows.append(len(kwargs[counted]) if counted else len(args[1]))

    hook = transformer.register_forward_pre_hook(count, with_kwargs=True)
    try:
        ask(row, engine, config(row, cfg=False), [PROMPTS[0]] * 5, cfg=False, images=row.images and row.images[:1])
    finally:
        hook.remove()
    steps = len(rows) // 2  # the first of Wan2.2's two transformers takes some of them
    assert steps >= 1 and rows == [3] * steps + [2] * steps


def test_a_failure_is_the_callers_and_the_next_batch_is_drawn(served):
    row, engine = served
    model_config = config(row, cfg=True, noise=0.7)
    with pytest.raises(ValueError, match="unknown sde_type"):
        ask(row, engine, model_config, PROMPTS, sde_type="nonsense")
    assert len(ask(row, engine, model_config, PROMPTS)) == 2


def test_text_and_images_are_encoded_once(served):
    """For five samples in two batches, of a prompt and an image that nobody else here has asked for."""
    row, engine = served
    images = row.images and [[picture(8, 8, 99)]]
    with counted(engine.engine.pipeline) as found:
        outputs = ask(row, engine, config(row, cfg=True), ["a heron"] * 5, images=images)
    most = 2 if row.images else 1  # beside an image the negative prompt is another one too
    assert len(outputs) == 5 and texts(found) and max(texts(found).values()) <= 1 + most
    assert found["vae"] == (1 if row.images else 0)


def test_latents_without_decoding(served):
    """What a reward is given with `reward.input=latents` is the embedded engine's."""
    row, engine = served
    model_config = config(row, cfg=False)
    asked = {"latents": "alone", "noise_level": 0.0, "sde_window": None}
    mine, theirs = (ask(row, e, model_config, PROMPTS, False, **asked) for e in (engine, rollout(model_config)))
    for one, other in zip(mine, theirs, strict=True):
        assert isinstance(one.response, Latents) and one.response.decoded is None
        torch.testing.assert_close(one.response.values, other.response.values, atol=1e-5, rtol=1e-5)
