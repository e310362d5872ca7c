"""Tiny pipelines that make images."""

from typing import TYPE_CHECKING, Any

import torch

from verl_omni.pipelines.vision_processor import image_text_processor
from verl_omni.testing.tiny_builders import image_vae, register_builder, strengthen
from verl_omni.testing.tiny_text import (
    GLM_IMAGE_TEMPLATE,
    clip_text_encoder,
    clip_tokenizer,
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

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

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


@register_builder("Lumina2Pipeline")
def lumina2() -> "DiffusionPipeline":
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    from verl_omni.pipelines.lumina2.adapter import SYSTEM_PROMPT

    tokenizer = gemma_tokenizer()
    tokenizer.add_tokens([SYSTEM_PROMPT])  # else it alone would be longer than a tiny prompt may be
    encoder = Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    transformer = Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cap_feat_dim=32,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(300, 64, 64),
    )
    strengthen(transformer, 2.0)
    return Lumina2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        vae=image_vae(scaling_factor=0.4, shift_factor=0.1),
        text_encoder=Gemma2Model(encoder).eval(),
        tokenizer=tokenizer,
        transformer=transformer,
    )


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
