"""What is particular to models that are given frames, or make sound."""

import dataclasses

import pytest
import test_architectures as architectures
import torch
from test_architectures import (  # noqa: F401
    config,
    draw,
    generate,
    mended_upstream,
    rollout,
    small_references,
    training_engine,
)
from tiny_models import tiny_checkpoint

from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
)
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler
from verl_omni.utils.errors import Refused
from verl_omni.utils.responses import VideoWithSound
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.rollout.image_request import RequestReader

ROWS = {row.name: row for row in architectures.TABLE}
LTX2 = ROWS["LTX2Pipeline"]
NEW = {
    "FluxKontextPipeline", "WanImageToVideoPipeline-TI2V", "LTX2Pipeline", "LongCatAudioDiTPipeline",
    "MiniMaxH3ModularPipeline",
}  # fmt: skip


def shared(share: float | None):
    """LTX-2's settings with so much of a log-probability for the sound."""
    model_config = config(LTX2, cfg=True, noise=0.7)
    return dataclasses.replace(
        model_config, algo=DiffusionRolloutAlgoConfig(sde_type="sde", noise_level=0.7, audio_share=share)
    )


@pytest.mark.parametrize("share", [None, 0.0, 0.25, 1.0])
def test_of_a_log_probability_the_sound_has_its_share(share):
    """By a scheduler that knows of none, on the video and on the sound alone."""
    model_config, steps = shared(share), torch.Generator().manual_seed(0)
    adapter = DiffusionModelBase.get_class(model_config)
    scheduler = adapter.build_scheduler(model_config)
    plain = FlowMatchSDEDiscreteScheduler.from_pretrained(model_config.path, subfolder="scheduler")
    for one in (scheduler, plain):
        one.set_timesteps(4, mu=1.0)
    size = adapter.geometry(model_config)
    x, v, after = torch.randn(3, 2, size.video + size.sound, 8, generator=steps)
    step = {"timestep": plain.timesteps[1], "noise_level": 0.7}
    found = scheduler.sample_previous_step(x, v, prev_sample=after, **step)[1]
    video, sound = (
        plain.sample_previous_step(x[:, part], v[:, part], prev_sample=after[:, part], **step)[1]
        for part in (slice(size.video), slice(size.video, None))
    )
    share = size.sound / (size.video + size.sound) if share is None else share
    torch.testing.assert_close(found, (1 - share) * video + share * sound, atol=1e-5, rtol=1e-5)


def test_rollout_and_training_share_alike():
    engine = training_engine(shared(0.5))
    data = architectures.as_batch(generate(LTX2, rollout(engine.model_config, engine.module), architectures.PROMPTS))
    with engine.eval_mode():
        replayed = engine.infer_batch(data)["model_output"]["log_probs"].view_as(data["rollout_log_probs"])
    torch.testing.assert_close(replayed, data["rollout_log_probs"], atol=1e-6, rtol=0)


@torch.no_grad()
def test_the_drift_that_grpo_guard_takes_out_is_that_of_the_log_probability():
    """What is left of a log-ratio is linear in Δμ, which is 0 on average; in float64, of what the engine hands it."""
    engine = training_engine(shared(0.5))
    drawn = generate(LTX2, rollout(engine.model_config, engine.module), architectures.PROMPTS, keep_means=True)
    data = architectures.as_batch(drawn)
    data |= {"old_log_probs": data["rollout_log_probs"], "advantages": torch.ones_like(data["rollout_log_probs"])}
    for name, weight in engine.parameters.items():
        if "audio_proj_out" in name:
            weight.add_(0.1)
    size, seen = engine.adapter.geometry(engine.model_config), []
    loss = build_loss_function(DiffusionActorConfig(diffusion_loss=DiffusionLossConfig("grpo_guard")))

    def watched(output, row):
        seen.append(result := loss(output, row))
        c = (output["std_dev_t"][:, 0, 0] * row["sqrt_dt"]).double()
        moved = output["prev_sample_mean"].double() - row["old_prev_sample_mean"].double()
        by_chance = row["prev_latents"].double() - row["old_prev_sample_mean"].double()
        parts = slice(size.video), slice(size.video, None)
        linear = sum((moved * by_chance)[:, part].mean((1, 2)) for part in parts) / 2 / c**2
        drift = sum((moved**2)[:, part].mean((1, 2)) for part in parts) / 2 / (2 * c**2)
        assert drift.min() > 1e-4
        torch.testing.assert_close(result.metrics["guard_bias"].double(), drift.mean(), rtol=1e-4, atol=0)
        left = (output["log_probs"] - row["old_log_probs"]).double() + drift
        torch.testing.assert_close(left, linear, atol=2e-5, rtol=0)
        return result

    with engine.eval_mode():
        engine.infer_batch(data, watched)
    assert seen


def test_a_folder_of_wan_2_2_ti2v_takes_first_frames_where_it_is_told_so():
    """Its model_index.json names the pipeline for prompts alone."""
    folder = tiny_checkpoint("WanPipeline-TI2V")
    row = ROWS["WanImageToVideoPipeline-TI2V"]
    model_config = dataclasses.replace(
        config(row, cfg=True), path=str(folder), architecture="WanImageToVideoPipeline"
    )
    (output,) = generate(row, rollout(model_config), architectures.PROMPTS[:1])
    expected, _ = draw(row.load(folder), row, 0, cfg=True)
    torch.testing.assert_close(output.trajectory["final_latents"][None], expected[:, :, 1:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("WanImageToVideoPipeline", (1, 1)),
        ("WanImageToVideoPipeline-2.2", (1, 2)),
        ("WanImageToVideoPipeline-TI2V", (1, 1)),
        ("LTX2ImageToVideoPipeline", (1, 1)),
        ("FluxKontextPipeline", (1, 1)),
    ],
)
def test_how_many_images_come_with_a_prompt(name, counts):
    model_config = config(ROWS[name], cfg=False)
    adapter = DiffusionModelBase.get_class(model_config)
    assert adapter.needs_images and adapter.images_of_a_prompt(model_config) == counts
    engine, images = rollout(model_config), [architectures.picture(8, 8, 0)] * 3
    with pytest.raises(ValueError, match="column `images`"):
        adapter.encode_images(engine.pipe, images, model_config)


@pytest.mark.parametrize("name", [row.name for row in architectures.TABLE if row.seldom or row.name in NEW])
@torch.no_grad()
def test_what_a_plan_reckons_with_has_the_shapes_of_a_prompt(name):
    row = ROWS[name]
    model_config = config(row, cfg=False)
    adapter = DiffusionModelBase.get_class(model_config)
    pipe, images = row.load(), [architectures.picture(8, 8, 0)] if row.images else None
    ids = adapter.tokenize(adapter.load_tokenizers(model_config), "a cat", 128, images)
    made = adapter.encode_prompt(pipe, ids, model_config, images) | adapter.encode_images(pipe, images, model_config)
    said = adapter.conditions_like(model_config, len(ids)) | adapter.images_like(model_config)
    assert {k: said[k].shape for k in made} == {k: v.shape for k, v in made.items()}  # a mask more does no harm


def test_a_video_with_sound_leaves_the_engine_as_one():
    (output,) = generate(LTX2, rollout(config(LTX2, cfg=False)), architectures.PROMPTS[:1])
    made = output.response
    assert isinstance(made, VideoWithSound) and output.modality == "video with sound"
    assert made.frames.shape == (5, 3, 32, 64) and made.sound.samples.shape[0] == 2
    assert made.sound.samples.shape[1] / made.sound.sample_rate == pytest.approx(5 / 25.0, abs=0.05)


@pytest.mark.parametrize(("prompt", "negative"), [("", "blurry"), ("A “dog”", ""), ("a dog", "A “Cat”")])
def test_prompts_of_a_sound_that_are_empty_or_written_otherwise(prompt, negative):
    """Upstream makes small letters of a prompt alone, reads an empty one, and takes no negative one for none."""
    row = dataclasses.replace(ROWS["LongCatAudioDiTPipeline"], negative=negative)
    (output,) = generate(row, rollout(config(row, cfg=True)), [prompt])
    expected, _ = draw(row.load(), row, 0, cfg=True, of={"prompt": prompt})
    torch.testing.assert_close(output.trajectory["final_latents"][None], expected, atol=1e-5, rtol=1e-5)


def test_guidance_of_a_sound_may_be_none():
    model_config = config(LTX2, cfg=True)
    adapter = DiffusionModelBase.get_class(model_config)
    for given, expected in ((None, 3.0), (0.0, 0.0), (2.0, 2.0)):
        model_config.pipeline.guidance_scale, model_config.pipeline.audio_guidance_scale = 3.0, given
        assert adapter.scales(model_config) == (3.0, expected)


def test_a_prompt_is_encoded_for_each_length_that_it_is_padded_to():
    engine = rollout(config(LTX2, cfg=False))
    found = [
        engine._encode([3, 4], None, (), dataclasses.replace(
            engine.model_config, pipeline=dataclasses.replace(engine.model_config.pipeline, max_sequence_length=length)
        ))["prompt_embeds"].shape[1]
        for length in (16, 32)
    ]  # fmt: skip
    assert found[0] < found[1]


def test_what_may_be_asked_over_http_of_models_with_sound():
    asked = DiffusionRolloutConfig()
    reader = RequestReader(asked, config(LTX2, cfg=False))
    assert "audio_guidance_scale" in reader.fields
    sound = config(ROWS["LongCatAudioDiTPipeline"], cfg=False)
    with pytest.raises(Refused, match="size=64x64: this model makes sound, which has none; leave it out"):
        RequestReader(asked, sound).read(b'{"prompt": "a dog", "size": "64x64"}')
