"""Tiny pipelines that make sounds."""

from typing import TYPE_CHECKING

import torch

from verl_omni.testing.tiny_builders import register_builder, strengthen
from verl_omni.testing.tiny_text import (
    qwen3_text_encoder,
    qwen_tokenizer,
    t5_encoder,
    t5_tokenizer,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


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
