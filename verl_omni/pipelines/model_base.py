"""The model seam: what is particular to one architecture, and nothing of any algorithm.

`DiffusionModelBase` is one adapter for two uses. Training replays a stored denoising step through
`prepare_model_inputs` and `forward_and_sample_previous_step`; the embedded rollout drives the same two with
`pipelines/sampling.py`, so that both compute the same velocity by construction. The base class carries what most
flow-matching models share; a new model overrides what differs.
"""

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.config.knob import MOST_IMAGES
from verl_omni.config.rollout import OF_SOME_MODELS
from verl_omni.pipelines.adapter_registry import AdapterRegistry
from verl_omni.pipelines.builtin import BUILTIN, OTHERS
from verl_omni.pipelines.shared_tokens import TokenPlan
from verl_omni.pipelines.utils import (
    is_modular,
    load_tokenizers,
    modular_pipeline,
    pipeline_class,
    random_pipeline,
    read_component_config,
    weights_in,
)
from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase
from verl_omni.pipelines.weights import NamedTensors, build_component, component_tensors, fill
from verl_omni.utils.model_code import LIBRARIES, refuse_code
from verl_omni.utils.responses import Response, Video

__all__ = ["Conditions", "DiffusionModelBase", "VllmOmniPipelineBase"]

Conditions = dict[str, torch.Tensor]


class DiffusionModelBase:
    """Adapter of one architecture. All methods are classmethods: an adapter holds no state."""

    registry: ClassVar[AdapterRegistry] = AdapterRegistry("model", BUILTIN | OTHERS)

    # LoRA target modules where the user names none.
    lora_target_modules: ClassVar[list[str]] = ["to_q", "to_k", "to_v", "to_out.0"]
    # Linear layers of the blocks that precision=fp8 computes in 8 bits, where the user names none: those that see every
    # token. Modulations see a row a sample: 8 bits would gain nothing there.
    fp8_modules: ClassVar[list[str]] = ["to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"]
    # The smallest step of height and width is vae_scale_factor times this.
    size_multiple: ClassVar[int] = 2
    # What `rollout.pipeline` leaves null, as the upstream pipeline has it.
    pipeline_defaults: ClassVar[dict[str, Any]] = {"negative_prompt": "", "max_sequence_length": 512}
    # The upstream pipeline's `guidance_scale`, where that is what guides away from a negative prompt; None: where
    # `true_cfg_scale` is.
    default_guidance: ClassVar[float | None] = None
    # Arguments of the transformer that are the same for all rows of a batch, such as positions.
    rowless_inputs: ClassVar[tuple[str, ...]] = ()
    # The attention kernel on a GPU where the user names none (actor.engine.attention_backend); None: diffusers' choice.
    attention_backend: ClassVar[str | None] = None
    # Whether a prompt is nothing without images.
    needs_images: ClassVar[bool] = False
    # Whether `tokenize` has to see them: long prompts are then told when they are drawn from, not before a run.
    tokenizes_images: ClassVar[bool] = False
    # The architecture that draws the same from images, of a folder that names this one.
    with_images: ClassVar[str | None] = None
    # Whether ranks can share the tokens of a sample (fsdp_config.ulysses_sequence_parallel_size).
    shares_tokens: ClassVar[bool] = True
    # Libraries, beside diffusers and transformers, that model_index.json may name for a component: they are imported.
    libraries: ClassVar[tuple[str, ...]] = ()
    # Components that a folder of a modular pipeline has to have: such a pipeline has others for other tasks.
    modular_parts: ClassVar[tuple[str, ...]] = ()
    # Components that a folder may lack, and without which vLLM-Omni does not draw.
    vllm_omni_needs: ClassVar[tuple[str, ...]] = ()
    # Submodules of the pipeline that are trained (Wan2.2 has two).
    trained_components: ClassVar[tuple[str, ...]] = ("transformer",)

    @classmethod
    def images_of_a_prompt(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        """How many images a prompt comes with, at least and at most: none, where a model would not look at them."""
        return (1, MOST_IMAGES) if cls.needs_images else (0, 0)

    # ---- registry ------------------------------------------------------------------------------------

    @classmethod
    def register(cls, architecture: str, algorithm: str = "flow_grpo"):
        """Class decorator: this adapter serves `architecture` (the `_class_name` in model_index.json)."""

        def wrap(adapter: type) -> type:
            cls.registry.add(architecture, algorithm, adapter)
            return adapter

        return wrap

    @classmethod
    def get_class(cls, model_config: DiffusionModelConfig) -> type["DiffusionModelBase"]:
        return cls.registry.find(model_config.architecture, model_config.algorithm)

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        """What this model reads of the knobs of `rollout.pipeline` that only some models have: others are refused."""
        return set(OF_SOME_MODELS)

    @classmethod
    def brings(cls, method: str) -> bool:
        """Whether this adapter has its own `method`, not the base class's."""
        return inspect.getattr_static(cls, method) is not inspect.getattr_static(DiffusionModelBase, method)

    @classmethod
    def missing_for_training(cls) -> list[str]:
        """What every engine needs and this adapter does not have."""
        return [] if cls.brings("model_inputs") or cls.brings("prepare_model_inputs") else ["model_inputs"]

    @classmethod
    def missing_for_rollout(cls) -> list[str]:
        """What the embedded rollout engine needs and this adapter, which then only trains, does not have."""
        needed = ("tokenize", "encode_prompt", "prepare_latents", "decode_latents")
        return [method for method in needed if not cls.brings(method)]

    @classmethod
    def vae_scale_factor(cls, model_config: DiffusionModelConfig) -> int:
        """Pixels a latent pixel, in each direction."""
        vae = read_component_config(model_config.path, "vae")
        if "scale_factor_spatial" in vae:  # Wan
            return vae["scale_factor_spatial"]
        if "temperal_downsample" in vae:  # Qwen-Image
            return 2 ** len(vae["temperal_downsample"])
        if "block_out_channels" in vae:
            return 2 ** (len(vae["block_out_channels"]) - 1)
        raise ValueError(
            f"the config of the VAE in {model_config.path} does not say how many pixels a latent pixel is: give "
            f"{cls.__name__} a classmethod vae_scale_factor"
        )

    @classmethod
    def grid(cls, model_config: DiffusionModelConfig) -> tuple[int, int]:
        """Height and width in latent tokens."""
        step = cls.size_multiple * cls.vae_scale_factor(model_config)
        return model_config.pipeline.height // step, model_config.pipeline.width // step

    @classmethod
    def token_plan(cls, part: torch.nn.Module) -> TokenPlan | None:
        """How ranks share the tokens of one of the trained modules, if they can: as diffusers has it."""
        plan = getattr(part, "_cp_plan", None)
        return None if plan is None else TokenPlan(plan)

    @classmethod
    def shared_tokens(cls, model_config: DiffusionModelConfig) -> int:
        """Those of a sample that are shared."""
        return cls.tokens(model_config)

    @classmethod
    def tokens(cls, model_config: DiffusionModelConfig) -> int:
        """Of a sample, in the transformer."""
        return math.prod(cls.grid(model_config))

    # ---- training and rollout ------------------------------------------------------------------------

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig):
        """The model's own noise schedule with our stochastic steps."""
        from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler

        return FlowMatchSDEDiscreteScheduler.from_pretrained(model_config.path, subfolder="scheduler")

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        """Timesteps exactly as the upstream pipeline sets them."""
        scheduler.set_timesteps(model_config.pipeline.num_inference_steps, device=device)

    @classmethod
    def timestep_at(cls, sigma: torch.Tensor, scheduler: Any, model_config: DiffusionModelConfig) -> torch.Tensor:
        """The timestep that a sample of this noise level has, any level: samples that were noised have it from here."""
        return sigma * scheduler.config.num_train_timesteps

    @classmethod
    def num_steps(cls, model_config: DiffusionModelConfig) -> int:
        """How many steps `set_timesteps` makes of `num_inference_steps`; SDE windows count these."""
        return model_config.pipeline.num_inference_steps

    @classmethod
    def model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        sample: torch.Tensor,
        timestep: torch.Tensor,
        prompt: Conditions,
    ) -> dict[str, Any]:
        """Keyword arguments of the transformer for samples (B, ...) at timesteps (B,).

        `prompt` is what `encode_prompt` returned, of the prompt or (under CFG) of the negative one.
        """
        raise NotImplementedError(f"{cls.__name__} has neither model_inputs nor prepare_model_inputs")

    @classmethod
    def prepare_model_inputs(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        latents: torch.Tensor,
        timesteps: torch.Tensor,
        prompt_embeds: torch.Tensor,
        prompt_embeds_mask: torch.Tensor | None,
        negative_prompt_embeds: torch.Tensor | None,
        negative_prompt_embeds_mask: torch.Tensor | None,
        micro_batch: Any,
        step: int,
    ) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """Keyword arguments of the transformer for denoising step `step`: with the prompt, and (under CFG) without.

        `latents` is (B, T, ...) and `timesteps` (B, T). What else `encode_prompt` returned is in `micro_batch`.
        """
        sample, timestep = latents[:, step], timesteps[:, step]
        prompt = {**micro_batch, "prompt_embeds": prompt_embeds, "prompt_embeds_mask": prompt_embeds_mask}
        positive = cls.model_inputs(module, model_config, sample, timestep, prompt)
        if cls.cfg_scale(model_config) <= 1:
            return positive, None
        lead = "negative_"
        negative = {n.removeprefix(lead): value for n, value in micro_batch.items() if n.startswith(lead)}
        negative |= {"prompt_embeds": negative_prompt_embeds, "prompt_embeds_mask": negative_prompt_embeds_mask}
        return positive, cls.model_inputs(module, model_config, sample, timestep, {**micro_batch, **negative})

    @classmethod
    def forward(cls, module: torch.nn.Module, model_inputs: dict[str, Any]) -> torch.Tensor:
        """One call of the transformer: the velocity noise - data, in the layout of the latents."""
        return module(**model_inputs, return_dict=False)[0]

    @classmethod
    def cfg_scale(cls, model_config: DiffusionModelConfig) -> float:
        """Strength of classifier-free guidance; 1 or less means that there is no unconditional half."""
        pipeline = model_config.pipeline
        if cls.default_guidance is None:
            return pipeline.true_cfg_scale
        return cls.default_guidance if pipeline.guidance_scale is None else pipeline.guidance_scale

    @classmethod
    def unguided(cls, model_config: DiffusionModelConfig) -> DiffusionModelConfig:
        """The same with classifier-free guidance off. A scale that the transformer itself reads stays as it is."""
        plain = dataclasses.replace(
            model_config, pipeline=dataclasses.replace(model_config.pipeline, true_cfg_scale=1.0)
        )
        if cls.cfg_scale(plain) > 1:
            plain.pipeline.guidance_scale, plain.pipeline.audio_guidance_scale = 0.0, None
        return plain

    @classmethod
    def guidance(
        cls, module: torch.nn.Module, model_config: DiffusionModelConfig, model_inputs: dict[str, Any]
    ) -> float | torch.Tensor:
        """The scale of classifier-free guidance for these inputs: one number, or a tensor with one for each row."""
        return cls.cfg_scale(model_config)

    @classmethod
    def combine_cfg(cls, cond: torch.Tensor, uncond: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
        return uncond + scale * (cond - uncond)

    @classmethod
    def predict_velocity(
        cls,
        module: torch.nn.Module,
        model_config: DiffusionModelConfig,
        model_inputs: dict[str, Any],
        negative_model_inputs: dict[str, Any] | None,
    ) -> torch.Tensor:
        """Guided velocity in float32. Only the conditional half carries a gradient, as in Flow-GRPO.

        A half that is known already has its `velocity` among its inputs.
        """

        def half(inputs: dict[str, Any]) -> torch.Tensor:
            return inputs["velocity"] if "velocity" in inputs else cls.forward(module, inputs).float()

        if negative_model_inputs is None:
            return half(model_inputs)
        with torch.no_grad():
            uncond = half(negative_model_inputs)
        return cls.combine_cfg(half(model_inputs), uncond, cls.guidance(module, model_config, model_inputs))

    @classmethod
    def forward_and_sample_previous_step(
        cls,
        module: torch.nn.Module,
        scheduler,
        model_config: DiffusionModelConfig,
        model_inputs: dict[str, Any],
        negative_model_inputs: dict[str, Any] | None,
        scheduler_inputs: dict[str, torch.Tensor],
        step: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log_prob, prev_sample_mean, std_dev_t) of the stored step `sample` -> `prev_sample` under this module."""
        velocity = cls.predict_velocity(module, model_config, model_inputs, negative_model_inputs)
        _, log_prob, mean, std_dev_t = scheduler.sample_previous_step(
            sample=scheduler_inputs["sample"],
            model_output=velocity,
            timestep=scheduler_inputs["timestep"],
            prev_sample=scheduler_inputs["prev_sample"],
            noise_level=model_config.algo.noise_level,
            sde_type=model_config.algo.sde_type,
        )
        return log_prob, mean, std_dev_t

    @classmethod
    def has_own_step(cls) -> bool:
        """Whether this adapter overrides `forward_and_sample_previous_step`: the rollout then asks it as well."""
        return cls.brings("forward_and_sample_previous_step")

    # ---- the trained module --------------------------------------------------------------------------

    @classmethod
    def build_module(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        """What is trained and rolled out, its weights on the meta device; by default the pipeline's one transformer."""
        return build_component(model_config, model_config.transformer_subfolder, dtype)

    @classmethod
    def named_tensors(cls, model_config: DiffusionModelConfig, part: str) -> NamedTensors:
        """The weights of one of `trained_modules`, to be read as they are needed."""
        folder = model_config.transformer_subfolder if part == cls.trained_components[0] else part
        return component_tensors(model_config, folder)

    @classmethod
    def load_module(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        """The same with its weights, on the CPU.

        An adapter may have this one alone: its module is then loaded whole by every rank.
        """
        module = cls.build_module(model_config, dtype)
        for name, part in cls.trained_modules(module).items():
            fill(part, cls.named_tensors(model_config, name), "cpu", dtype)
        return module

    @classmethod
    def loads_whole(cls) -> bool:
        """Whether this adapter overrides `load_module` and says nothing of how to build it."""
        owner = next(base for base in cls.__mro__ if {"load_module", "build_module"} & vars(base).keys())
        return owner is not DiffusionModelBase and "build_module" not in vars(owner)

    @classmethod
    def trained_modules(cls, module: torch.nn.Module) -> dict[str, torch.nn.Module]:
        """The diffusers models inside `module`, under their names in the pipeline."""
        return {cls.trained_components[0]: module}

    @classmethod
    def write_part(
        cls, model_config: DiffusionModelConfig, part: torch.nn.Module, state: dict[str, torch.Tensor], folder: str
    ) -> None:
        """Write one of `trained_modules`, where it is none of diffusers' models: those are written without it."""
        raise NotImplementedError(f"{cls.__name__} has no write_part")

    @classmethod
    def parts_at(cls, module: torch.nn.Module, timesteps: torch.Tensor) -> set[str]:
        """Which of `trained_modules` samples at these timesteps (N,) go through: all of them by default."""
        return set(cls.trained_modules(module))

    # ---- prompts and images: what the embedded rollout needs beside the transformer ------------------

    @classmethod
    def load_pipeline(cls, model_config: DiffusionModelConfig, device: torch.device | str, dtype: torch.dtype):
        """The upstream pipeline without what is trained: tokenizers, text encoders, VAE and their helpers."""
        cls.refuse_code(model_config)
        given = dict.fromkeys(cls.trained_components) | cls.load_processors(model_config)
        if model_config.load_format == "dummy":
            return random_pipeline(model_config, dtype, given).to(device)
        kind = pipeline_class(model_config.architecture)
        if is_modular(kind):
            return modular_pipeline(model_config, dtype, given).to(device)
        pipe = kind.from_pretrained(model_config.path, **weights_in(dtype), use_safetensors=True, **given)
        pipe.set_progress_bar_config(disable=True)
        return pipe.to(device)

    @classmethod
    def refuse_code(cls, model_config: DiffusionModelConfig) -> None:
        """One line where a folder that is read for this model holds anything that would run."""
        for folder in filter(None, (model_config.path, model_config.config_path, model_config.tokenizer_path)):
            refuse_code(folder, (*LIBRARIES, *cls.libraries))

    @classmethod
    def load_processors(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        """Components of the pipeline that have to be loaded in another way than by the class in model_index.json."""
        return {}

    @classmethod
    def load_tokenizers(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        return load_tokenizers(model_config.tokenizer_path or model_config.path)

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """Token ids of one prompt, its template included, exactly as the upstream pipeline makes them.

        `images` (PIL) are those that the prompt speaks of, for models that are conditioned on images.
        """
        raise NotImplementedError(f"{cls.__name__} has no tokenize")

    @classmethod
    def tokenize_negative(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        """The same of a negative prompt, for models that read it in another way."""
        return cls.tokenize(tokenizers, prompt, max_sequence_length, images)

    @classmethod
    def encode_prompt(
        cls, pipe, prompt_ids: list[int], model_config: DiffusionModelConfig, images: list[Any] | None = None
    ) -> Conditions:
        """Text features of one prompt (batch of 1): `prompt_embeds`, `prompt_embeds_mask` and what more it takes.

        One prompt at a time, so that its features do not depend on what else is in a batch.
        """
        raise NotImplementedError(f"{cls.__name__} has no encode_prompt")

    @classmethod
    def encode_images(cls, pipe, images: list[Any] | None, model_config: DiffusionModelConfig) -> Conditions:
        """What a prompt's images give whatever its text is (batch of 1), such as latents of what is edited.

        They are encoded once, for the prompt, its negative one and any other text that comes with the same images.
        `encode_prompt` of an adapter that has this sees them only where the model `tokenizes_images`.
        """
        return {}

    @classmethod
    def drawn_conditions(
        cls,
        pipe,
        prompts: list[list[int]],
        model_config: DiffusionModelConfig,
        seeds: list[int],
        written: list[list[int] | None],
    ) -> list[Conditions]:
        """What each sample has beside the features of its prompt (ids of `tokenize`), drawn from its own seed; none by
        default. A row of a batch does not depend on the others. `written` are tokens that a model before this one,
        which is trained too, has drawn already."""
        return [{} for _ in prompts]

    @classmethod
    def conditions_like(cls, model_config: DiffusionModelConfig, tokens: int) -> Conditions:
        """Zeros in the shapes of what `encode_prompt` makes of so many ids of `tokenize`, for `verl-omni plan`."""
        widths = ("joint_attention_dim", "text_dim", "cap_feat_dim", "cross_attention_dim")
        width = next((value for name in widths if (value := cls.transformer_config(model_config).get(name))), None)
        if width is None:
            raise ValueError(
                f"the config of the transformer does not say how wide text features are: give {cls.__name__} a "
                "classmethod conditions_like"
            )
        return {"prompt_embeds": torch.zeros(1, tokens, width), "prompt_embeds_mask": torch.ones(1, tokens).bool()}

    @classmethod
    def images_like(cls, model_config: DiffusionModelConfig) -> Conditions:
        """The same of `encode_images`, with as few images as a prompt may have."""
        return {}

    @classmethod
    def transformer_config(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        return read_component_config(model_config.config_path or model_config.path, model_config.transformer_subfolder)

    @classmethod
    def prepare_latents(
        cls, pipe, module: torch.nn.Module, model_config: DiffusionModelConfig, generators: list[torch.Generator]
    ) -> torch.Tensor:
        """Initial noise in float32, one row a generator."""
        raise NotImplementedError(f"{cls.__name__} has no prepare_latents")

    @classmethod
    def whole_latents(cls, latents: torch.Tensor, conditions: Conditions) -> torch.Tensor:
        """What is decoded: the latents that were drawn, and those that a prompt gave, such as a first frame's."""
        return latents

    @classmethod
    def latents_by_place(cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """What is decoded, as a reward is given it (`reward.input=latents`): channels, then frames, rows and columns.

        As it was drawn, unless an adapter says otherwise: one whose transformer takes tokens does.
        """
        return latents

    @classmethod
    def decode_latents(
        cls, pipe, latents: torch.Tensor, model_config: DiffusionModelConfig
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Images (B, 3, H, W) or videos (B, F, 3, H, W) in [0, 1], or what `responses` makes of another kind."""
        raise NotImplementedError(f"{cls.__name__} has no decode_latents")

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        """The kind of what it makes: one of `verl_omni.utils.responses.KINDS`."""
        return "video" if "num_frames" in cls.pipeline_knobs(model_config) else "image"

    @classmethod
    def responses(
        cls, decoded: torch.Tensor | tuple[torch.Tensor, ...], pipe: Any, model_config: DiffusionModelConfig
    ) -> Sequence[Response]:
        """What `decode_latents` gave, as it is scored and shown: pixels in 256 steps. Of another kind, a list."""
        pixels, rate = (decoded * 255).round().to(torch.uint8), cls.frame_rate(model_config)
        return pixels if rate is None else [Video(frames, rate) for frames in pixels.cpu()]

    @classmethod
    def frame_rate(cls, model_config: DiffusionModelConfig) -> float | None:
        """Frames a second that its videos are made to be seen at; None: it makes none, or nobody knows."""
        return None

    @classmethod
    def encode_image(cls, pipe, images: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """Latents (float32) of images (B, 3, H, W) in [0, 1], the inverse of `decode_latents`; for offline training."""
        raise NotImplementedError(
            f"{cls.__name__} cannot turn images into latents yet: give its adapter an encode_image, the inverse of its "
            "decode_latents"
        )

    @classmethod  # noqa: B027  (nothing to refuse by default)
    def check(cls, model_config: DiffusionModelConfig) -> None:
        """Raise one clear line where this architecture cannot do what is asked. Runs before any worker starts."""
