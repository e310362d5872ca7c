"""A batch may hold samples of several sizes: each is replayed as it was drawn, and counts as it would alone."""

import asyncio

import pytest
import torch
from test_architectures import PROMPTS, SEQUENCE, TABLE, as_param, config, mean_log_prob, rollout, training_engine

from verl_omni.workers.columns import Ragged, stacked

NOISE = (0.7, 0.4)  # of the one and the other: a sample brings its own


def draw(row, engine, i: int):
    """Prompt i in size i, with noise of its own; a video with other frames, too."""
    tokenizers = engine.adapter.load_tokenizers(engine.model_config)

    def ids(text: str) -> list[int]:
        return engine.adapter.tokenize(tokenizers, text, SEQUENCE, row.images and row.images[i])

    steps = engine.adapter.num_steps(engine.model_config)
    size = dict(row.sizes[i])
    if "num_frames" in engine.adapter.pipeline_knobs(engine.model_config):
        size["num_frames"] = ((22, 39) if row.name.startswith("MiniMaxH3") else (5, 9))[i]
    params = {"seed": i, "keep_trajectory": True, "sde_window": (0, steps - 1), "noise_level": NOISE[i], **size}
    images = row.images and row.images[i]
    negative = engine.adapter.tokenize_negative(tokenizers, row.negative, SEQUENCE, images)
    drawn = engine.generate(ids(PROMPTS[i]), params, str(i), image_data=images, negative_prompt_ids=negative)
    return asyncio.run(drawn)


def batch(outputs) -> dict:
    rows = [output.trajectory | output.conditions for output in outputs]
    return {name: stacked(name, [row[name] for row in rows]) for name in rows[0]}


def gradient(engine, data) -> list[torch.Tensor]:
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, mean_log_prob)
        return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in engine.parameters.values()]


@pytest.mark.parametrize("row", [as_param(row) for row in TABLE])
def test_each_sample_is_trained_as_it_was_drawn(row):
    engine = training_engine(config(row, cfg=True, noise=NOISE[0], lora_rank=2 * row.lora, lora_init="gaussian"))
    engine.micro_batch_size = 2
    outputs = [draw(row, rollout(engine.model_config, engine.module), i) for i in (0, 1)]
    mixed = batch([outputs[1], outputs[0], outputs[1]])
    assert isinstance(mixed["all_latents"], Ragged) and mixed["size"].unique(dim=0).shape[0] == 2

    with engine.eval_mode():
        found = engine.infer_batch(mixed)["model_output"]
    ratio = (found["log_probs"].view_as(mixed["rollout_log_probs"]) - mixed["rollout_log_probs"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-6, rtol=0)
    means = found["prev_sample_mean"].unflatten(0, ratio.shape)
    assert [m.shape[1:] for m in means.rows] == [latents.shape[1:] for latents in mixed["all_latents"].rows]

    alone = [gradient(engine, batch([output])) for output in outputs]
    for together, first, second in zip(gradient(engine, mixed), *alone, strict=True):
        expected = (first + 2 * second) / 3
        torch.testing.assert_close(together, expected, atol=1e-4 * expected.abs().max().item() + 1e-7, rtol=0)


def test_windows_of_different_lengths_are_no_batch():
    with pytest.raises(ValueError, match="2 and 3 steps of all_timesteps"):
        stacked("all_timesteps", [torch.zeros(2), torch.zeros(3)])
    assert stacked("prompt_embeds", [torch.ones(2, 4), torch.ones(3, 4)]).shape == (2, 3, 4)
