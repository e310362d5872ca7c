"""Tiny pipelines that make videos, with sound or without."""

import inspect
from typing import TYPE_CHECKING, Any

import torch

from verl_omni.testing.tiny_builders import register_builder, strengthen
from verl_omni.testing.tiny_image_text import image_text_model
from verl_omni.testing.tiny_text import (
    gemma_text_encoder,
    gemma_tokenizer,
    qwen_text_encoder,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline, ModularPipeline, WanTransformer3DModel


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


@register_builder("WanPipeline-TI2V")
def wan_expand_timesteps() -> "DiffusionPipeline":
    """Wan2.2-TI2V of prompts alone, as its folder has it: a timestep for each token."""
    return wan(expand_timesteps=True)


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


def ltx2_parts(connectors: dict[str, Any] | None = None, transformer: dict[str, Any] | None = None) -> dict[str, Any]:
    """A latent is 2 frames of 32 x 32 pixels, or 4 steps of 10 ms of a spectrogram. Sound at 8 kHz.

    What is given is said of these parts beside the rest.
    """
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
    text_connectors = LTX2TextConnectors(
        **{"audio_connector_attention_head_dim": 8} | (connectors or {}),
        caption_channels=16,
        text_proj_in_factor=3,
        video_connector_num_attention_heads=2,
        video_connector_attention_head_dim=8,
        video_connector_num_layers=1,
        video_connector_num_learnable_registers=8,
        audio_connector_num_attention_heads=2,
        audio_connector_num_layers=1,
        audio_connector_num_learnable_registers=8,
    )
    denoiser = LTX2VideoTransformer3DModel(
        **(transformer or {}),
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
    strengthen(denoiser, 1.5)
    vocoder = LTX2Vocoder(
        in_channels=32,
        hidden_channels=8,
        upsample_kernel_sizes=[20, 16],
        upsample_factors=[10, 8],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
        output_sampling_rate=8000,
    )
    with torch.no_grad():  # as torch starts them, biases outshout what comes in, and every sound is the same
        for name, parameter in vocoder.named_parameters():
            parameter.mul_(0.0 if name.endswith("bias") else 2.0)
    return dict(
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
        ),
        vae=vae,
        audio_vae=audio_vae,
        text_encoder=gemma_text_encoder(tokenizer, hidden_size=16, layers=2),
        tokenizer=tokenizer,
        connectors=text_connectors,
        transformer=denoiser,
        vocoder=vocoder,
    )


@register_builder("LTX2Pipeline")
def ltx2() -> "DiffusionPipeline":
    from diffusers import LTX2Pipeline

    return LTX2Pipeline(**ltx2_parts())


def ltx2_3_parts() -> dict[str, Any]:
    """Gates in attention, text that is modulated by time and projected before the transformer, positions in two halves,
    sound at 16 kHz."""
    from diffusers.pipelines.ltx2.vocoder import LTX2VocoderWithBWE

    parts = ltx2_parts(
        connectors={
            "per_modality_projections": True,
            "video_hidden_dim": 16,
            "audio_hidden_dim": 8,
            "audio_connector_attention_head_dim": 4,
            "video_gated_attn": True,
            "audio_gated_attn": True,
        },
        transformer={
            "gated_attn": True,
            "audio_gated_attn": True,
            "cross_attn_mod": True,
            "audio_cross_attn_mod": True,
            "use_prompt_embeddings": False,
            "rope_type": "split",
        },
    )
    sizes = {"hidden_channels": 8, "resnet_kernel_sizes": [3], "resnet_dilations": [[1]]}
    vocoder = LTX2VocoderWithBWE(
        **sizes,
        in_channels=32,
        upsample_kernel_sizes=[20, 16],
        upsample_factors=[10, 8],
        **{f"bwe_{name}": value for name, value in sizes.items()},
        bwe_in_channels=32,
        bwe_upsample_kernel_sizes=[20, 32],
        bwe_upsample_factors=[10, 16],
        filter_length=64,
        window_length=64,
        num_mel_channels=16,
        input_sampling_rate=8000,
        output_sampling_rate=16000,
    )
    for name, buffer in vocoder.named_buffers():  # those that come with a checkpoint
        if "mel_stft" in name:
            torch.nn.init.uniform_(buffer)
    return parts | {"vocoder": vocoder}


@register_builder("LTX2Pipeline-2.3")
def ltx2_3() -> "DiffusionPipeline":
    from diffusers import LTX2Pipeline

    return LTX2Pipeline(**ltx2_3_parts())


@register_builder("LTX2ImageToVideoPipeline")
def ltx2_image_to_video() -> "DiffusionPipeline":
    from diffusers import LTX2ImageToVideoPipeline

    return LTX2ImageToVideoPipeline(**ltx2_parts())


@register_builder("LTX2ImageToVideoPipeline-2.3")
def ltx2_3_image_to_video() -> "DiffusionPipeline":
    from diffusers import LTX2ImageToVideoPipeline

    return LTX2ImageToVideoPipeline(**ltx2_3_parts())


@register_builder("MiniMaxH3ModularPipeline")
def minimax_h3() -> "ModularPipeline":
    """A token is 2 x 2 latents of 8 x 8 pixels, or 200 samples of a sound at 8 kHz."""
    from verl_omni.pipelines.minimax_h3.adapter import check_diffusers

    check_diffusers()
    from diffusers import (
        AutoencoderKLMiniMaxH3,
        AutoencoderKLMiniMaxH3Audio,
        MiniMaxH3ModularPipeline,
        MiniMaxH3Scheduler,
        MiniMaxH3Transformer3DModel,
    )

    tokenizer = qwen_tokenizer([])
    vae = AutoencoderKLMiniMaxH3(
        latent_channels=6,
        block_out_channels=(8, 8, 8),
        layers_per_block=1,
        spatial_downsample_factors=(2, 2, 2),
        temporal_downsample_factors=(1, 2, 2),
        norm_num_groups=2,
        decoder_num_layers=1,
        decoder_num_attention_heads=2,
        decoder_attention_head_dim=16,
        latents_mean=[-0.3, 0.2, 0.1, -0.1, 0.4, 0.0],
        latents_std=[1.2, 0.8, 1.5, 0.7, 1.0, 1.1],
    )
    audio_vae = AutoencoderKLMiniMaxH3Audio(
        encoder_dim=4,
        encoder_rates=[10, 20],
        latent_dim=16,
        latent_channels=8,
        num_attention_heads=2,
        decoder_dim=16,
        decoder_rates=[20, 10],
        decoder_kernel_sizes=[40, 20],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
        sampling_rate=8000,
        latents_mean=[0.3, -0.1, 0.2, 0.0, -0.4, 0.1, 0.5, -0.2],
        latents_std=[1.3, 0.9, 1.1, 0.7, 1.0, 1.2, 0.8, 1.4],
    )
    transformer = MiniMaxH3Transformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=48,
        in_channels=6,
        audio_in_channels=8,
        text_dim=32,
        freq_dim=32,
        time_embed_hidden_dim=32,
        time_embed_dim=32,
        rope_freq_dim=2,
    )
    strengthen(vae.decoder, 2.0)
    strengthen(transformer, 1.5)
    pipeline = MiniMaxH3ModularPipeline()
    pipeline.update_components(
        tokenizer=tokenizer,
        text_encoder=image_text_model("qwen3_vl", tokenizer, layers=pipeline.text_encoder_layer + 1),
        vae=vae,
        audio_vae=audio_vae,
        transformer=transformer,
        scheduler=MiniMaxH3Scheduler(shift=12.0),
        audio_scheduler=MiniMaxH3Scheduler(shift=3.0),
    )
    return pipeline
