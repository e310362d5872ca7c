"""Tiny checkpoints with random weights: valid diffusers folders of the real classes, for trying things on a CPU.

    python -m verl_omni.testing.tiny_random QwenImagePipeline OUT

A folder is built without network in about a second, in float32, byte for byte the same for the same seed. Every tiny
model answers to each of its inputs (prompt, timestep, latents), so that a test that mixes up two of them fails.

A new architecture is one function: a builder, registered under the pipeline's class name, that returns the pipeline. A
variant of a class has a name after a hyphen, as in WanPipeline-2.2.
"""

import argparse
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl_omni.pipelines.vision_processor import image_text_processor
from verl_omni.testing.tiny_text import (
    GLM_IMAGE_TEMPLATE,
    clip_text_encoder,
    clip_tokenizer,
    gemma_text_encoder,
    gemma_tokenizer,
    glm_image_language_model,
    glm_image_tokenizer,
    mistral_text_encoder,
    mistral_tokenizer,
    qwen3_text_encoder,
    qwen3_tokenizer,
    qwen_text_encoder,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
)
from verl_omni.utils.suggest import unknown

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DiffusionPipeline, WanTransformer3DModel

BUILDERS: dict[str, Callable[[], "DiffusionPipeline"]] = {}

# What QwenImagePipeline writes before the prompt. It cuts off the first 34 tokens, so a tokenizer must make exactly
# 34 of these words.
QWEN_IMAGE_PREFIX = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n"
)

# The same of QwenImageEditPlusPipeline: 64 tokens.
QWEN_EDIT_PREFIX = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, "
    "background), then explain how the user's text instruction should alter or modify the image. Generate a new image "
    "that meets the user's requirements while maintaining consistency with the original input where appropriate."
    "<|im_end|>\n<|im_start|>user\n"
)


def register_builder(pipeline_class: str) -> Callable:
    """Register a function without arguments that returns a randomly initialised tiny pipeline of this class."""

    def decorator(builder: Callable[[], "DiffusionPipeline"]) -> Callable[[], "DiffusionPipeline"]:
        BUILDERS[pipeline_class] = builder
        return builder

    return decorator


def build_tiny_random(pipeline_class: str, out: str | Path, seed: int = 0) -> Path:
    """Build the tiny-random checkpoint of a pipeline class in the folder ``out`` and return that folder."""
    if pipeline_class not in BUILDERS:
        raise ValueError(unknown("tiny pipeline", pipeline_class, BUILDERS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = BUILDERS[pipeline_class]()
    pipeline.save_pretrained(out)
    return Path(out)


@torch.no_grad()
def strengthen(module: torch.nn.Module, gain: float) -> None:
    """Multiply the weights of linear and convolution layers: torch's default start lets a signal fade on its way."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d):
            layer.weight.mul_(gain)


def image_vae(**config) -> "AutoencoderKL":
    """The autoencoder of SD3, Flux and Z-Image with factor 8 and 4 latent channels."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        norm_num_groups=2,
        latent_channels=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        **config,
    )
    strengthen(vae.decoder, 2.0)
    return vae


def qwen_image_parts(prefix: str) -> dict[str, Any]:
    """What Qwen-Image and Qwen-Image-Edit share; the words of ``prefix`` are one token each."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

    tokenizer = qwen_tokenizer([prefix, "assistant\n"])
    text_encoder = qwen_text_encoder(tokenizer, hidden_size=32)
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        # Not 0 and 1, so that a forgotten or inverted normalisation shows.
        latents_mean=[-0.3, 0.2, 0.1, -0.1],
        latents_std=[1.2, 0.8, 1.5, 0.7],
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    strengthen(vae.decoder, 2.0)
    strengthen(transformer, 2.0)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
    return dict(scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, transformer=transformer)


@register_builder("QwenImagePipeline")
def qwen_image() -> "DiffusionPipeline":
    from diffusers import QwenImagePipeline

    return QwenImagePipeline(**qwen_image_parts(QWEN_IMAGE_PREFIX))


@register_builder("QwenImageEditPlusPipeline")
def qwen_image_edit_plus() -> "DiffusionPipeline":
    from diffusers import QwenImageEditPlusPipeline
    from transformers import Qwen2VLImageProcessor

    parts = qwen_image_parts(QWEN_EDIT_PREFIX)
    processor = image_text_processor()(Qwen2VLImageProcessor(), parts["tokenizer"])
    return QwenImageEditPlusPipeline(processor=processor, **parts)


@register_builder("StableDiffusion3Pipeline")
def stable_diffusion_3() -> "DiffusionPipeline":
    """SD3.5-medium's features: query and key norms, and a second attention in the first block."""
    from diffusers import (
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        pos_embed_max_size=32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    strengthen(transformer, 1.3)
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(scaling_factor=1.5, shift_factor=0.06),
        text_encoder=clip_text_encoder(clip, CLIPTextModelWithProjection),
        tokenizer=clip,
        text_encoder_2=clip_text_encoder(clip, CLIPTextModelWithProjection),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )


def flux_parts() -> dict[str, Any]:
    """What FLUX.1 and FLUX.1 Kontext share: all of it."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import CLIPTextModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )
    strengthen(transformer, 1.5)
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=image_vae(scaling_factor=0.4, shift_factor=0.1),
        text_encoder=clip_text_encoder(clip, CLIPTextModel),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
        transformer=transformer,
    )


@register_builder("FluxPipeline")
def flux() -> "DiffusionPipeline":
    from diffusers import FluxPipeline

    return FluxPipeline(**flux_parts())


@register_builder("FluxKontextPipeline")
def flux_kontext() -> "DiffusionPipeline":
    from diffusers import FluxKontextPipeline

    return FluxKontextPipeline(**flux_parts())


@register_builder("ChromaPipeline")
def chroma() -> "DiffusionPipeline":
    from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

    t5 = t5_tokenizer()
    transformer = ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    strengthen(transformer, 1.5)
    return ChromaPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=image_vae(scaling_factor=0.4, shift_factor=0.1),
        text_encoder=t5_encoder(t5),
        tokenizer=t5,
        transformer=transformer,
    )


@register_builder("CogView4Pipeline")
def cogview4() -> "DiffusionPipeline":
    from diffusers import CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
    from transformers import GlmConfig, GlmModel

    tokenizer = qwen3_tokenizer()
    transformer = CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=32,
        condition_dim=16,
        rope_axes_dim=(16, 16),
    )
    strengthen(transformer, 1.5)
    config = GlmConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    return CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=GlmModel(config).eval(),
        vae=image_vae(scaling_factor=0.4),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )


@register_builder("GlmImagePipeline")
def glm_image() -> "DiffusionPipeline":
    """32 kinds of image tokens, always the likeliest. Before those of the image come some 256 of a preview."""
    from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline, GlmImageTransformer2DModel
    from transformers import ByT5Tokenizer, GlmImageProcessor
    from transformers.models.glm_image.image_processing_pil_glm_image import GlmImageImageProcessorPil

    codes, tokenizer, byt5 = 32, glm_image_tokenizer(32), ByT5Tokenizer()
    transformer = GlmImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=32,
        condition_dim=16,
        prior_vq_quantizer_codebook_size=codes,
    )
    strengthen(transformer, 1.5)
    statistics = {"latents_mean": [-0.3, 0.2, 0.1, -0.1], "latents_std": [1.2, 0.8, 1.5, 0.7]}
    return GlmImagePipeline(
        tokenizer=byt5,
        processor=GlmImageProcessor(GlmImageImageProcessorPil(), tokenizer, chat_template=GLM_IMAGE_TEMPLATE),
        text_encoder=t5_encoder(byt5),
        vision_language_encoder=glm_image_language_model(tokenizer, codes),
        vae=image_vae(**statistics),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )


@register_builder("AceStepPipeline")
def ace_step() -> "DiffusionPipeline":
    """A turbo model. A latent is 8 samples of a wave at 80 Hz: 2 s are 20 of them, and the 30 s of timbre are 300."""
    from diffusers import (
        AceStepConditionEncoder,
        AceStepPipeline,
        AceStepTransformer1DModel,
        AutoencoderOobleck,
        FlowMatchEulerDiscreteScheduler,
    )
    from transformers import Qwen3Model

    # Around a prompt there is much text, which is to leave room for it.
    around = AceStepPipeline._format_prompt(AceStepPipeline, "", "", audio_duration=1234)
    tokenizer = qwen_tokenizer([*around, "a song of old red walls, seen from afar in the long evening light"])
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    shape |= {"head_dim": 16, "sliding_window": 8}
    transformer = AceStepTransformer1DModel(
        **shape, num_hidden_layers=2, in_channels=24, audio_acoustic_hidden_dim=8, is_turbo=True
    )
    encoder = AceStepConditionEncoder(
        **shape, text_hidden_dim=32, timbre_hidden_dim=8, num_lyric_encoder_hidden_layers=1,
        num_timbre_encoder_hidden_layers=1,
    )  # fmt: skip
    torch.nn.init.normal_(encoder.silence_latent, std=0.3)
    strengthen(transformer, 1.5)
    vae = AutoencoderOobleck(
        encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=8,
        decoder_input_channels=8, sampling_rate=80,
    )  # fmt: skip
    return AceStepPipeline(
        vae=vae,
        text_encoder=qwen3_text_encoder(tokenizer, Qwen3Model),
        tokenizer=tokenizer,
        transformer=transformer,
        condition_encoder=encoder,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1, shift=1.0),
    )


@register_builder("LongCatAudioDiTPipeline")
def longcat_audio() -> "DiffusionPipeline":
    """A latent is 8 samples of a wave: 0.02 s at 8 kHz are 20 of them."""
    from diffusers import LongCatAudioDiTPipeline, LongCatAudioDiTTransformer, LongCatAudioDiTVae

    tokenizer = t5_tokenizer()
    transformer = LongCatAudioDiTTransformer(dit_dim=32, dit_depth=2, dit_heads=2, dit_text_dim=32, latent_dim=8)
    for parameter in transformer.parameters():  # diffusers begins with zeros in some, which hide what comes before them
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    strengthen(transformer, 1.5)
    vae = LongCatAudioDiTVae(
        channels=4,
        c_mults=[1, 2],
        strides=[2, 4],
        latent_dim=8,
        encoder_latent_dim=16,
        downsampling_ratio=8,
        sample_rate=8000,
    )
    return LongCatAudioDiTPipeline(
        vae=vae, text_encoder=t5_encoder(tokenizer, "UMT5"), tokenizer=tokenizer, transformer=transformer
    )


@register_builder("ZImagePipeline")
def z_image() -> "DiffusionPipeline":
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
    from transformers import Qwen3Model

    tokenizer = qwen3_tokenizer()
    transformer = ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[1024, 64, 64],
    )
    strengthen(transformer, 2.0)
    for token in (transformer.x_pad_token, transformer.cap_pad_token):  # diffusers leaves them uninitialised
        torch.nn.init.normal_(token, std=0.5)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=image_vae(scaling_factor=0.4, shift_factor=0.1),
        text_encoder=qwen3_text_encoder(tokenizer, Qwen3Model),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def wan_transformer(in_channels: int = 4, **config) -> "WanTransformer3DModel":
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=in_channels,
        out_channels=4,
        text_dim=32,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=32,
        **config,
    )
    strengthen(transformer, 1.5)
    return transformer


def wan_parts() -> dict[str, Any]:
    """What all Wans share."""
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler

    tokenizer = t5_tokenizer()
    vae = AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[-0.3, 0.2, 0.1, -0.1],
        latents_std=[1.2, 0.8, 1.5, 0.7],
    )
    strengthen(vae.decoder, 2.0)
    return dict(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer, "UMT5"),
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


@register_builder("WanPipeline")
def wan(**config) -> "DiffusionPipeline":
    """Wan2.1, text to video."""
    from diffusers import WanPipeline

    return WanPipeline(**wan_parts(), transformer=wan_transformer(), **config)


@register_builder("WanPipeline-2.2")
def wan_2_2() -> "DiffusionPipeline":
    """Wan2.2: one transformer for high noise, one for low."""
    return wan(transformer_2=wan_transformer(), boundary_ratio=0.875)


@register_builder("HunyuanVideo15Pipeline")
def hunyuan_video_15() -> "DiffusionPipeline":
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import ByT5Tokenizer

    # It cuts off the first 108 tokens: every word of its system message has to be one.
    message = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
    tokenizer, byt5 = qwen_tokenizer([message, "system user assistant\n"]), ByT5Tokenizer()
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        scaling_factor=0.8,
    )
    strengthen(vae.decoder, 2.0)
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        task_type="t2v",
    )
    strengthen(transformer, 1.5)
    return HunyuanVideo15Pipeline(
        text_encoder=qwen_text_encoder(tokenizer, layers=4).model.language_model,
        tokenizer=tokenizer,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder_2=t5_encoder(byt5),
        tokenizer_2=byt5,
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )


@register_builder("WanImageToVideoPipeline")
def wan_image_to_video() -> "DiffusionPipeline":
    """Wan2.1: the first frame as channels (4 of a mask and 4 of latents) and as CLIP's features."""
    from diffusers import WanImageToVideoPipeline
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    return WanImageToVideoPipeline(
        **wan_parts(),
        transformer=wan_transformer(12, image_dim=16, added_kv_proj_dim=24),
        image_encoder=CLIPVisionModel(vision).eval(),
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
    )


@register_builder("WanImageToVideoPipeline-2.2")
def wan_image_to_video_2_2() -> "DiffusionPipeline":
    """Wan2.2: the first frame as channels, and the last one too where it is given; two transformers."""
    from diffusers import WanImageToVideoPipeline

    both = {"transformer": wan_transformer(12), "transformer_2": wan_transformer(12)}
    return WanImageToVideoPipeline(**wan_parts(), **both, boundary_ratio=0.9)


@register_builder("WanImageToVideoPipeline-TI2V")
def wan_ti2v() -> "DiffusionPipeline":
    """Wan2.2-TI2V: the first frame among the latents, with a timestep of its own."""
    from diffusers import WanImageToVideoPipeline

    return WanImageToVideoPipeline(**wan_parts(), transformer=wan_transformer(), expand_timesteps=True)


def ltx2_parts() -> dict[str, Any]:
    """A latent is 2 frames of 32 x 32 pixels, or 4 steps of 10 ms of a spectrogram. Sound at 8 kHz."""
    from diffusers import (
        AutoencoderKLLTX2Audio,
        AutoencoderKLLTX2Video,
        FlowMatchEulerDiscreteScheduler,
        LTX2VideoTransformer3DModel,
    )
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    tokenizer = gemma_tokenizer()
    vae = AutoencoderKLLTX2Video(
        latent_channels=8,
        block_out_channels=(8,),
        down_block_types=("LTX2VideoDownBlock3D",),
        decoder_block_out_channels=(8,),
        layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,),
        decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False),
        downsample_type=("spatiotemporal",),
        upsample_type=("spatiotemporal",),
        upsample_residual=(False,),
        upsample_factor=(1,),
        patch_size=16,
        decoder_spatial_padding_mode="zeros",  # of a single latent nothing can be reflected
    )
    audio_vae = AutoencoderKLLTX2Audio(
        base_channels=8, ch_mult=(1, 1, 1), num_res_blocks=1, latent_channels=2, sample_rate=8000, mel_hop_length=80,
        mel_bins=16,
    )  # fmt: skip
    for one in (vae, audio_vae):  # not 0 and 1, so that a forgotten or inverted normalisation shows
        torch.nn.init.normal_(one.latents_mean, std=0.3)
        torch.nn.init.uniform_(one.latents_std, 0.5, 2.0)
    connectors = LTX2TextConnectors(
        caption_channels=16,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=2,
        audio_connector_attention_head_dim=8,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
    )
    transformer = LTX2VideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        vae_scale_factors=(2, 32, 32),
        audio_in_channels=8,
        audio_out_channels=8,
        audio_num_attention_heads=2,
        audio_attention_head_dim=4,
        audio_cross_attention_dim=8,
        audio_sampling_rate=8000,
        audio_hop_length=80,
        num_layers=2,
        caption_channels=16,
    )
    strengthen(transformer, 1.5)
    vocoder = LTX2Vocoder(
        in_channels=32,
        hidden_channels=8,
        upsample_kernel_sizes=[20, 16],
        upsample_factors=[10, 8],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
        output_sampling_rate=8000,
    )
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
        ),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=gemma_text_encoder(tokenizer, hidden_size=16, layers=2),
        tokenizer=tokenizer,
        connectors=connectors,
        transformer=transformer,
        vocoder=vocoder,
    )


@register_builder("LTX2Pipeline")
def ltx2() -> "DiffusionPipeline":
    from diffusers import LTX2Pipeline

    return LTX2Pipeline(**ltx2_parts())


@register_builder("LTX2ImageToVideoPipeline")
def ltx2_image_to_video() -> "DiffusionPipeline":
    from diffusers import LTX2ImageToVideoPipeline

    return LTX2ImageToVideoPipeline(**ltx2_parts())


def flux2_parts(hidden_size: int, guidance_embeds: bool) -> dict[str, Any]:
    """What FLUX.2 dev and klein share; the text encoder is ``hidden_size`` wide."""
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel

    vae = AutoencoderKLFlux2(block_out_channels=(8, 8, 8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=2)
    strengthen(vae.decoder, 2.0)
    # Not 0 and 1, so that a forgotten or inverted normalisation shows.
    torch.nn.init.normal_(vae.bn.running_mean, std=0.3)
    torch.nn.init.uniform_(vae.bn.running_var, 0.5, 2.0)
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=3 * hidden_size,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    strengthen(transformer, 2.0)
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        transformer=transformer,
    )


@register_builder("Flux2Pipeline")
def flux2() -> "DiffusionPipeline":
    """FLUX.2 dev. Its tokenizer stands where the published folder has a processor, which wants torchvision."""
    from diffusers import Flux2Pipeline
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    tokenizer = mistral_tokenizer([SYSTEM_MESSAGE])
    return Flux2Pipeline(
        text_encoder=mistral_text_encoder(tokenizer, hidden_size=16, layers=30),
        tokenizer=tokenizer,
        **flux2_parts(hidden_size=16, guidance_embeds=True),
    )


@register_builder("Flux2KleinPipeline")
def flux2_klein() -> "DiffusionPipeline":
    from diffusers import Flux2KleinPipeline
    from transformers import Qwen3ForCausalLM

    tokenizer = qwen3_tokenizer()
    return Flux2KleinPipeline(
        text_encoder=qwen3_text_encoder(tokenizer, Qwen3ForCausalLM, hidden_size=16, layers=27),
        tokenizer=tokenizer,
        **flux2_parts(hidden_size=16, guidance_embeds=False),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny checkpoint with random weights in diffusers' format.")
    parser.add_argument("pipeline_class", metavar="PIPELINE", help=f"one of: {', '.join(sorted(BUILDERS))}")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        print(build_tiny_random(args.pipeline_class, args.out, args.seed))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
