"""Every architecture against diffusers' own pipeline, and rollout against training: one table, the same tests."""

import asyncio
import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import LTX2ImageToVideoPipeline, LTX2Pipeline
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from diffusers.pipelines.wan import pipeline_wan, pipeline_wan_i2v
from PIL import Image
from tiny_models import tiny_checkpoint
from transformers import PreTrainedModel

from verl_omni.config import (
    CheckpointConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
    FSDPConfig,
    OptimizerConfig,
)
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import diffusers_since, is_modular, pipeline_class
from verl_omni.pipelines.vision_processor import image_text_processor
from verl_omni.utils.padding import pad_and_cat
from verl_omni.workers.engine import checkpoint_io
from verl_omni.workers.engine.fsdp.diffusers_impl import PPODiffusersFSDPEngine
from verl_omni.workers.engine.policies import local
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

STEPS = 4
SIZES = [{"height": 32, "width": 48}, {"height": 64, "width": 32}]
PROMPTS = ["a cat", 'a sign that reads "407", on a long wall of old red bricks, seen from afar in the evening light']
SEQUENCE = 128  # longest prompt in tokens


def as_they_are(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    return size | {"max_sequence_length": SEQUENCE} | ({"image": images} if images else {})


def as_kontext(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    """It makes all images as large as it was trained on, unless it is told how large."""
    return as_they_are(size, images) | {"max_area": size["height"] * size["width"]}


def as_guided(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    return size  # the rest is a guider's, and the pipeline's own


def as_first_frame(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    last = {"last_image": images[1]} if len(images) > 1 else {}
    return as_they_are(size, images) | {"image": images[0]} | last


def as_video_with_sound(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    """Since 0.40 it has more kinds of guidance by default."""
    others = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0, "use_cross_timestep": False}
    others |= {f"audio_{name}": value for name, value in others.items() if name != "use_cross_timestep"}
    if images:
        others |= {"image": images[0]} | ({"image_crf": 0} if diffusers_since("0.40") else {})
    both = ["latents", "audio_latents"]
    return as_they_are(size, images) | others | {"callback_on_step_end_tensor_inputs": both}


def as_video_with_sound_2_3(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    """Upstream takes LTX-2.3's own way for the older one's, unless it is told."""
    return as_video_with_sound(size, images) | {"use_cross_timestep": True}


def as_sound(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    return size


def as_music(size: dict[str, Any], images: list[Image.Image] | None) -> dict[str, Any]:
    return {"audio_duration": size["audio_duration_s"]}


@dataclass
class Architecture:
    """One row of the table: a tiny checkpoint, and knobs that our config and diffusers' pipeline share."""

    name: str
    guided: dict[str, Any]  # with classifier-free guidance
    plain: dict[str, Any]  # without
    both: dict[str, Any] = field(default_factory=dict)
    negative: str = "blurry"
    images: list[list[Image.Image]] | None = None  # one list for each prompt
    sizes: list[dict[str, Any]] = field(default_factory=lambda: SIZES)
    lora: bool = True  # whether diffusers has it for this model
    before: int = 0  # tokens that stand before a prompt, and not before a negative one
    seldom: bool = False  # a relative of another row: most of its tests are among the slow ones
    # what diffusers' pipeline is asked for a size and the images of a prompt, where that is not what it is called here
    asked: Callable[[dict[str, Any], list[Image.Image] | None], dict[str, Any]] = as_they_are

    @property
    def makes(self) -> str:
        model_config = config(self, cfg=False)
        return DiffusionModelBase.get_class(model_config).makes(model_config)

    def load(self, path=None):
        """The stock pipeline."""
        path = path or tiny_checkpoint(self.name)
        edits = {}
        if self.name == "QwenImageEditPlusPipeline":  # its own wants torchvision
            edits["processor"] = image_text_processor().from_pretrained(f"{path}/processor")
        pipe = pipeline_class(self.name.split("-")[0]).from_pretrained(path, **edits)
        if is_modular(type(pipe)):
            pipe.load_components(dtype=torch.float32)
            pipe.update_components(processor=TextAlone())  # its own wants torchvision
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def knobs(self, cfg: bool) -> dict[str, Any]:
        return self.both | (self.guided if cfg else self.plain)


class TextAlone:
    """What MiniMax-H3's pipeline asks the processor of its text encoder, of prompts without images."""

    def create_mm_token_type_ids(self, rows: list[list[int]]) -> list[list[int]]:
        return [[0] * len(ids) for ids in rows]


def picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((2 * width, 2 * height))


GUIDANCE = {"guided": {"guidance_scale": 5.0}, "plain": {"guidance_scale": 1.0}}
LTX2 = {
    "guided": {"guidance_scale": 3.0, "audio_guidance_scale": 2.0},
    "plain": {"guidance_scale": 1.0, "audio_guidance_scale": 1.0},
    "both": {"num_frames": 5, "frame_rate": 25.0},
    "sizes": [{"height": 32, "width": 64}, {"height": 64, "width": 32}],
    "asked": as_video_with_sound,
}
# As Wan2.2's and HunyuanVideo-1.5's authors show them, and diffusers' examples of Wan.
FRAMES_A_SECOND = {"WanPipeline-TI2V": 24, "WanImageToVideoPipeline-TI2V": 24, "HunyuanVideo15Pipeline": 24}
TRUE_CFG = {"guided": {"true_cfg_scale": 4.0}, "plain": {"true_cfg_scale": 1.0}}
TABLE = [
    Architecture("QwenImagePipeline", **TRUE_CFG),
    Architecture(
        "QwenImageEditPlusPipeline",
        **TRUE_CFG,
        images=[[picture(8, 8, 0)], [picture(4, 8, 1), picture(8, 8, 2)], [picture(8, 8, 3)]],
    ),
    Architecture("StableDiffusion3Pipeline", **GUIDANCE),
    Architecture(
        "FluxPipeline",
        guided={"true_cfg_scale": 3.0, "guidance_scale": 2.0},
        plain={"true_cfg_scale": 1.0, "guidance_scale": 3.0},
    ),
    Architecture(
        "FluxKontextPipeline",
        guided={"true_cfg_scale": 3.0, "guidance_scale": 2.0},
        plain={"true_cfg_scale": 1.0, "guidance_scale": 3.0},
        images=[[picture(8, 8, 0)], [picture(4, 8, 1)], [picture(8, 8, 3)]],
        asked=as_kontext,
    ),
    Architecture("ChromaPipeline", **GUIDANCE, seldom=True),
    # FLUX.2 dev has guidance as an input only, and neither pipeline takes a negative prompt: klein's is empty.
    Architecture("Flux2Pipeline", guided={"guidance_scale": 2.0}, plain={"guidance_scale": 4.0}, negative=""),
    Architecture("Flux2KleinPipeline", **GUIDANCE, negative=""),
    Architecture("CogView4Pipeline", **GUIDANCE, seldom=True),
    Architecture(
        "GlmImagePipeline",
        guided={"guidance_scale": 3.0},
        plain={"guidance_scale": 1.0},
        negative="",
        sizes=[{"height": 32, "width": 64}, {"height": 64, "width": 32}],
        seldom=True,
    ),
    Architecture("Lumina2Pipeline", **GUIDANCE, before=17, seldom=True),
    Architecture("ZImagePipeline", guided={"guidance_scale": 4.0}, plain={"guidance_scale": 0.0}),
    Architecture("WanPipeline", **GUIDANCE, both={"num_frames": 5}),
    Architecture(
        "WanPipeline-2.2",
        guided={"guidance_scale": 5.0, "guidance_scale_2": 3.0},
        plain={"guidance_scale": 1.0},
        both={"num_frames": 5},
    ),
    Architecture("WanPipeline-TI2V", **GUIDANCE, both={"num_frames": 5}, seldom=True),
    Architecture("HunyuanVideo15Pipeline", **GUIDANCE, both={"num_frames": 5}, asked=as_guided, seldom=True),
    Architecture(
        "WanImageToVideoPipeline",
        **GUIDANCE,
        both={"num_frames": 5},
        images=[[picture(8, 8, 0)], [picture(4, 8, 1)], [picture(8, 8, 3)]],
        asked=as_first_frame,
        seldom=True,
    ),
    Architecture(
        "WanImageToVideoPipeline-2.2",
        guided={"guidance_scale": 5.0, "guidance_scale_2": 3.0},
        plain={"guidance_scale": 1.0},
        both={"num_frames": 5},
        images=[[picture(8, 8, 0)], [picture(4, 8, 1), picture(8, 8, 2)], [picture(8, 8, 3)]],
        asked=as_first_frame,
        seldom=True,
    ),
    Architecture(
        "WanImageToVideoPipeline-TI2V",
        **GUIDANCE,
        both={"num_frames": 5},
        images=[[picture(8, 8, 0)], [picture(4, 8, 1)], [picture(8, 8, 3)]],
        asked=as_first_frame,
    ),
    Architecture("LTX2Pipeline", **LTX2),
    # Other connectors, attention and vocoder than LTX-2's, and text that is modulated by time.
    Architecture("LTX2Pipeline-2.3", **LTX2, seldom=True),
    Architecture(
        "LTX2ImageToVideoPipeline",
        **LTX2,
        images=[[picture(8, 8, 0)], [picture(4, 8, 1)], [picture(8, 8, 3)]],
        seldom=True,
    ),
    Architecture(
        "LTX2ImageToVideoPipeline-2.3",
        **LTX2 | {"asked": as_video_with_sound_2_3},
        images=[[picture(8, 8, 0)], [picture(4, 8, 1)], [picture(8, 8, 3)]],
        seldom=True,
    ),
    Architecture(
        "MiniMaxH3ModularPipeline",
        guided={},
        plain={},
        negative=" ",  # without a word, and yet a prompt: upstream draws nothing of an empty one
        both={"num_frames": 22},
    ),
    Architecture(
        "AceStepPipeline",
        guided={},
        plain={},
        negative="",
        sizes=[{"audio_duration_s": 2.0}, {"audio_duration_s": 3.5}],
        asked=as_music,
        lora=False,
        seldom=True,
    ),
    Architecture(
        "LongCatAudioDiTPipeline",
        **GUIDANCE,
        sizes=[{"audio_duration_s": 0.02}, {"audio_duration_s": 0.032}],
        asked=as_sound,
        lora=False,
    ),
]


def as_param(row: Architecture, *values: Any, seldom: bool = True) -> Any:
    name = "-".join([row.name, *(str(value) for value in values)])
    return pytest.param(row, *values, id=name, marks=[pytest.mark.slow] if row.seldom and seldom else [])


@pytest.fixture(params=[as_param(row) for row in TABLE])
def row(request) -> Architecture:
    return request.param


def shrink_references() -> None:
    """Upstream scales reference images to 1024 x 1024 pixels, whatever is drawn. Here 64 x 64 will do."""
    pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS = [(64, 64), (32, 64)]
    pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE = pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = 64 * 64


@pytest.fixture(scope="module", autouse=True)
def text_encoders_are_loaded_once():
    """Nobody trains them, and loading them is a third of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        load, loaded = PreTrainedModel.from_pretrained.__func__, {}

        def once(cls, *args, **kwargs):
            key = (cls, repr(args), repr(sorted(kwargs.items())))
            if key not in loaded:
                loaded[key] = load(cls, *args, **kwargs)
            return loaded[key]

        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(once))
        yield


@pytest.fixture(autouse=True)
def small_references(monkeypatch):
    for name in ("CONDITION_IMAGE_SIZE", "VAE_IMAGE_SIZE"):
        monkeypatch.setattr(pipeline_qwenimage_edit_plus, name, getattr(pipeline_qwenimage_edit_plus, name))
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [])
    shrink_references()


@pytest.fixture(autouse=True)
def mended_upstream(monkeypatch):
    """LTX-2 tells a callback of the video's latents alone, though it has the sound's at hand. Wan's image to video uses
    a package that it has not looked for, unlike its text to video. MiniMax-H3 makes no less than five seconds."""
    for pipeline in (LTX2Pipeline, LTX2ImageToVideoPipeline):
        monkeypatch.setattr(pipeline, "_callback_tensor_inputs", ["latents", "audio_latents"])
    monkeypatch.setattr(pipeline_wan_i2v, "prompt_clean", pipeline_wan.prompt_clean)
    if diffusers_since("0.40"):
        monkeypatch.setattr(pipeline_class("MiniMaxH3ModularPipeline"), "min_duration", 0.0)


@functools.cache
def upstream(name: str):
    """The stock pipeline. Tests that change it load their own."""
    return next(row for row in TABLE if row.name == name).load()


def draw(
    pipe, row: Architecture, i: int, cfg: bool, size: int = 0, of: dict[str, Any] | None = None
) -> list[torch.Tensor]:
    """What diffusers draws of prompt i: latents as they are stepped, and pixels as (1, 3, H, W) or (1, F, 3, H, W)."""
    latents, knobs = [], row.knobs(cfg)
    if hasattr(pipe, "guider"):  # and no callback
        pipe.guider = pipe.guider.new(guidance_scale=knobs.pop("guidance_scale"))
        asked = row.asked(row.sizes[size], None) | knobs | ({"negative_prompt": row.negative} if cfg else {})
        asked |= {"prompt": PROMPTS[i]} | (of or {}) | {"num_inference_steps": STEPS}
        return [
            pipe(**asked, generator=torch.Generator().manual_seed(i), output_type=kind)[0] for kind in ("latent", "pt")
        ]

    if is_modular(type(pipe)):
        asked = {"prompt": PROMPTS[i], "num_inference_steps": STEPS} | row.sizes[size] | knobs | (of or {})
        names = ["latents", "audio_latents", "videos", "audio"]
        made = pipe(**asked, generator=torch.Generator().manual_seed(i), output_type="pt", output=names)
        video, sound = (made[name] for name in names[:2])
        both = patchified(video, pipe.patch_size), sound.mT
        return [torch.cat([part.reshape(1, -1, 8) for part in both], dim=1), (made["videos"], made["audio"])]

    def after_step(pipe, step, timestep, tensors):
        both = [tensors[name] for name in ("latents", "audio_latents") if name in tensors]
        latents[:] = [torch.cat(both, dim=1)]
        return tensors

    made = pipe(
        **({"prompt": PROMPTS[i]} | (of or {})),
        num_inference_steps=STEPS,
        generator=torch.Generator().manual_seed(i),
        output_type="pt",
        callback_on_step_end=after_step,
        **knobs,
        **({"negative_prompt": row.negative} if cfg and row.negative else {}),
        **row.asked(row.sizes[size], row.images and row.images[i]),
    )
    return [*latents, tuple(made.values()) if len(made) > 1 else made[0]]


def patchified(video: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """(1, C, frames, rows, columns) as (1, tokens, numbers)."""
    for dim, part in enumerate(patch, start=2):
        video = video.unflatten(dim, (-1, part)).movedim(dim + 1, -1)
    return video.flatten(2, 4).movedim(2, 1).flatten(2)


def config(row: Architecture, cfg: bool, size: int = 0, noise=0.0, sde_type="sde", **model) -> DiffusionModelConfig:
    return DiffusionModelConfig(
        path=str(tiny_checkpoint(row.name)),
        pipeline=DiffusionPipelineConfig(
            num_inference_steps=STEPS,
            max_sequence_length=SEQUENCE,
            **row.sizes[size],
            **row.knobs(cfg),
        ),
        algo=DiffusionRolloutAlgoConfig(sde_type=sde_type, noise_level=noise),
        **model,
    )


def rollout(
    model_config: DiffusionModelConfig, module: torch.nn.Module | None = None, one_forward: bool = False
) -> DiffusersRollout:
    adapter = DiffusionModelBase.get_class(model_config)
    module = adapter.load_module(model_config, torch.float32) if module is None else module
    settings = DiffusionRolloutConfig(cfg_in_one_forward=one_forward)
    return DiffusersRollout(settings, model_config, module.eval(), torch.device("cpu"), torch.float32)


def generate(
    row: Architecture, engine: DiffusersRollout, prompts: list[str], together: bool = True, keep_means: bool = False
):
    """Requests as the agent loop makes them, in one batch or one after another."""
    tokenizers = engine.adapter.load_tokenizers(engine.model_config)

    def tokenize(text: str, i: int) -> list[int]:
        return engine.adapter.tokenize(tokenizers, text, SEQUENCE, row.images and row.images[i])

    def away(i: int) -> list[int]:
        return engine.adapter.tokenize_negative(tokenizers, row.negative, SEQUENCE, row.images and row.images[i])

    steps = engine.adapter.num_steps(engine.model_config)
    window = (0, steps - 1) if engine.model_config.algo.noise_level else None

    async def run():
        params = [
            dict(seed=s, keep_trajectory=True, keep_means=keep_means, sde_window=window) for s in range(len(prompts))
        ]
        if together:
            params = [p | {"position": (i, len(prompts))} for i, p in enumerate(params)]
        calls = [
            engine.generate(
                tokenize(prompts[i], i),
                p,
                str(i),
                image_data=row.images and row.images[i],
                negative_prompt_ids=away(i),
            )
            for i, p in enumerate(params)
        ]
        return await asyncio.gather(*calls) if together else [await call for call in calls]

    return asyncio.run(run())


def whole(engine: DiffusersRollout, output) -> torch.Tensor:
    """The latents that are decoded, (1, ...)."""
    conditions = {name: value[None] for name, value in output.conditions.items()}
    return engine.adapter.whole_latents(output.trajectory["final_latents"][None], conditions)


def without_given(output, *latents: torch.Tensor) -> list[torch.Tensor]:
    """Of latents, those that were drawn: upstream steps those of a first frame too, and throws them away."""
    drawn = output.trajectory["final_latents"].shape
    if len(drawn) == 4:  # channels first
        return [one[:, :, -drawn[1] :] for one in latents]
    return [one[:, -drawn[0] :] for one in latents]


def as_batch(outputs) -> dict[str, torch.Tensor]:
    """Finished requests as the batch that training gets."""
    rows = [output.trajectory | output.conditions for output in outputs]
    return {key: pad_and_cat([row[key][None] for row in rows]) for key in rows[0]}


def training_engine(model_config: DiffusionModelConfig, lr: float = 0.1) -> PPODiffusersFSDPEngine:
    engine = PPODiffusersFSDPEngine(model_config, FSDPConfig(), OptimizerConfig(lr=lr), CheckpointConfig())
    engine.initialize()
    return engine


def largest_difference(one: Any, other: Any) -> float:
    """Of tensors, or of each of several."""
    pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
    return max((a - b).abs().max().item() for a, b in pairs)


def mean_log_prob(output, micro_batch):
    return SimpleNamespace(loss=-output["log_probs"].mean(), metrics={}, add_loss_metric=False)


@pytest.mark.parametrize(
    ("row", "guidance", "size"),
    [
        as_param(row, guidance, size, seldom=(guidance, size) != ("cfg", 1))
        for row in TABLE
        for guidance in ("plain", "cfg")
        for size in (0, 1)
    ],
)
def test_without_noise_it_is_diffusers(row, guidance, size, record_property):
    cfg = guidance == "cfg"
    model_config = config(row, cfg, size)
    engine = rollout(model_config)
    # A video VAE makes more of the last bits in which latents of a batch differ: videos come one by one, as upstream's.
    outputs = generate(row, engine, PROMPTS, together="num_frames" not in row.both)
    for i, output in enumerate(outputs):
        latents = whole(engine, output)
        expected_latents, expected = draw(upstream(row.name), row, i, cfg, size)
        given = latents.shape != output.trajectory["final_latents"][None].shape
        shown = latents if given else expected_latents  # upstream's callback has not put the given ones back yet
        with torch.no_grad():
            made = engine.adapter.decode_latents(engine.pipe, shown, model_config)
        record_property("latents", largest_difference(*without_given(output, latents, expected_latents)))
        record_property("decoded", largest_difference(made, expected))
        torch.testing.assert_close(*without_given(output, latents, expected_latents), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(made, expected, atol=2e-5 if shown is expected_latents else 5e-5, rtol=0)
        response = output.response
        if row.makes == "sound":
            torch.testing.assert_close(response.samples, expected[0].clamp(-1, 1), atol=1e-5, rtol=0)
            assert response.sample_rate == engine.pipe.sample_rate
        elif row.makes == "video with sound":
            torch.testing.assert_close(response.frames / 255, expected[0][0], atol=0.51 / 255, rtol=0)
            torch.testing.assert_close(response.sound.samples, expected[1][0].clamp(-1, 1), atol=1e-5, rtol=0)
            hertz, rate = 16000 if row.name.endswith("-2.3") else 8000, row.both.get("frame_rate", 24.0)
            assert (response.frame_rate, response.sound.sample_rate) == (rate, hertz)
        else:
            if row.makes == "video":
                assert response.frame_rate == FRAMES_A_SECOND.get(row.name, 16)
                response = response.frames
            assert response.shape == made.shape[1:] and response.dtype == torch.uint8


@torch.no_grad()
def test_images_go_into_latents_and_out_again(row):
    """As through the VAE alone: scaling and packing cancel."""
    if row.makes != "image":
        pytest.skip("for images")
    model_config, pipe = config(row, cfg=False), upstream(row.name)
    adapter = DiffusionModelBase.get_class(model_config)
    images = torch.rand(2, 3, *row.sizes[0].values(), generator=torch.Generator().manual_seed(0))
    latents = adapter.encode_image(pipe, images, model_config)
    assert latents.shape[1:] == generate(row, rollout(model_config), PROMPTS[:1])[0].trajectory["final_latents"].shape
    pixels = 2 * images - 1
    pixels = pixels[:, :, None] if row.name.startswith("Qwen") else pixels
    encoded = pipe.vae.encode(pixels).latent_dist.mode()
    placed = adapter.latents_by_place(pipe, latents, model_config)
    assert placed.shape == (len(images), encoded.shape[1], *encoded.shape[-2:])
    for channel, i, j in itertools.product(range(placed.shape[1]), (0, 1), (0, 1)):  # Flux2 scales each
        pair = [one[:, channel, ..., i::2, j::2].flatten() for one in (placed, encoded)]
        assert torch.corrcoef(torch.stack(pair))[0, 1] > 0.999
    expected = pipe.vae.decode(encoded).sample
    expected = (expected.reshape(images.shape) / 2 + 0.5).clamp(0, 1)
    torch.testing.assert_close(adapter.decode_latents(pipe, latents, model_config), expected, atol=1e-5, rtol=0)


def test_a_mixed_batch_equals_one_by_one(row):
    model_config = config(row, cfg=True, noise=0.7)
    prompts = [*PROMPTS, "a dog"]
    engine = rollout(model_config)
    together = generate(row, engine, prompts)
    alone = generate(row, engine, prompts, together=False)
    for one, other in zip(together, alone, strict=True):
        for key in ("final_latents", "all_latents", "rollout_log_probs"):
            torch.testing.assert_close(one.trajectory[key], other.trajectory[key], atol=1e-5, rtol=1e-5)


def test_with_the_halves_of_cfg_in_one_forward_it_is_diffusers_too(row):
    outputs = generate(row, rollout(config(row, cfg=True), one_forward=True), PROMPTS)
    for i, output in enumerate(outputs):
        expected, _ = draw(upstream(row.name), row, i, cfg=True)
        both = without_given(output, output.trajectory["final_latents"][None], expected)
        torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)


def test_halves_of_cfg_share_a_forward_where_their_shapes_agree(row, monkeypatch):
    model_config = config(row, cfg=True)
    adapter = DiffusionModelBase.get_class(model_config)
    rows, original = [], adapter.forward.__func__

    def counting(cls, module, inputs):
        rows.append(len(inputs["timestep" if "timestep" in inputs else "t"]))
        return original(cls, module, inputs)

    monkeypatch.setattr(adapter, "forward", classmethod(counting))
    steps, guided = adapter.num_steps(model_config), adapter.cfg_scale(model_config) > 1
    prompts = [row.negative] * 2
    row = dataclasses.replace(row, negative=row.negative + "y" * row.before)  # as long as the other half
    generate(row, rollout(model_config, one_forward=True), prompts)
    assert rows == [4 if guided else 2] * steps
    rows.clear()
    generate(row, rollout(model_config), prompts)
    assert rows == [2] * (2 * steps if guided else steps)


@pytest.mark.parametrize(
    ("sde_type", "one_forward"), [("sde", False), ("cps", False), ("dance_sde", False), ("sde", True)]
)
def test_training_finds_the_log_probs_of_the_rollout(row, sde_type, one_forward, record_property):
    engine = training_engine(config(row, cfg=True, noise=0.7, sde_type=sde_type))
    data = as_batch(generate(row, rollout(engine.model_config, engine.module, one_forward), PROMPTS))
    with engine.train_mode():
        replayed = engine.infer_batch(data)["model_output"]["log_probs"].view_as(data["rollout_log_probs"])
        record_property("log_prob", largest_difference(replayed, data["rollout_log_probs"]))
        ratio = (replayed - data["rollout_log_probs"]).exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-6, rtol=0)
        engine.train_batch(data, mean_log_prob)
        for name, part in engine.parts.items():
            assert any(p.grad is not None and local(p.grad).any() for p in part.parameters()), name
        moved = engine.infer_batch(data)["model_output"]["log_probs"].view_as(ratio)
    # of every step: that of one sample may come back to where it was by chance
    assert (moved - replayed).abs().amax(0).min() > 1e-4


def test_lora_loads_into_the_stock_pipeline(row, tmp_path):
    if not row.lora:
        pytest.skip("diffusers has no LoRA for it")
    engine = training_engine(config(row, cfg=True, lora_rank=4, lora_alpha=8))
    names = [name for part in engine.parts.values() for name, _ in part.named_modules()]
    for target in engine.adapter.lora_target_modules:
        assert any(f".{name}".endswith(f".{target}") for name in names), target
    generator = torch.Generator().manual_seed(0)
    for parameter in engine.parameters.values():
        shard = local(parameter.data)
        shard.copy_(torch.randn(shard.shape, generator=generator) * 0.1)
    checkpoint_io.export(engine, str(tmp_path))

    pipe = row.load()
    before, _ = draw(pipe, row, 0, cfg=True)
    weights = "pytorch_lora_weights.safetensors"
    loads = pipe.load_lora_weights if hasattr(pipe, "load_lora_weights") else pipe.transformer.load_lora_adapter
    loads(str(tmp_path), weight_name=weights)
    if "transformer_2" in engine.parts:
        pipe.load_lora_weights(str(tmp_path / "transformer_2"), weight_name=weights, load_into_transformer_2=True)
    after, _ = draw(pipe, row, 0, cfg=True)
    (ours,) = generate(row, rollout(engine.model_config, engine.module), PROMPTS[:1])
    assert (after - before).abs().mean() > 1e-3
    both = without_given(ours, ours.trajectory["final_latents"][None], after)
    torch.testing.assert_close(*both, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("row", [as_param(row) for row in TABLE if not row.lora])
def test_all_weights_load_into_the_stock_pipeline(row, tmp_path):
    """Of models that diffusers has no LoRA for."""
    engine, generator = training_engine(config(row, cfg=True)), torch.Generator().manual_seed(0)
    for parameter in engine.parameters.values():
        shard = local(parameter.data)
        shard.add_(torch.randn(shard.shape, generator=generator) * 0.01)
    checkpoint_io.export(engine, str(tmp_path))

    pipe = row.load()
    before, _ = draw(pipe, row, 0, cfg=True)
    pipe.register_modules(transformer=type(pipe.transformer).from_pretrained(tmp_path / "transformer"))
    after, _ = draw(pipe, row, 0, cfg=True)
    (ours,) = generate(row, rollout(engine.model_config, engine.module), PROMPTS[:1])
    assert (after - before).abs().mean() > 1e-3
    torch.testing.assert_close(ours.trajectory["final_latents"][None], after, atol=1e-5, rtol=1e-5)
