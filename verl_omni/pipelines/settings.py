"""What one image of a model can be asked to be: how validation asks for it, and which sizes there are."""

import dataclasses
from typing import Any

import numpy as np

from verl_omni.config import (
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionRolloutConfig,
    validation_pipeline,
)
from verl_omni.pipelines.model_base import DiffusionModelBase


def validation_sampling(rollout: DiffusionRolloutConfig, model: DiffusionModelConfig, **over: Any) -> dict[str, Any]:
    """The sampling parameters of validation, but for seeds; `over` are knobs of the pipeline to be otherwise."""
    val, pipeline = rollout.val_kwargs, dataclasses.replace(validation_pipeline(rollout), **over)
    sampling = dataclasses.asdict(pipeline) | {
        "noise_level": val.noise_level,
        "sde_type": val.sde_type or rollout.algo.sde_type,
    }
    if val.noise_level > 0:
        model = dataclasses.replace(model, pipeline=pipeline)
        sampling["sde_window"] = (0, DiffusionModelBase.get_class(model).num_steps(model) - 1)
    return sampling


def sized(model: DiffusionModelConfig, size: tuple[int, ...]) -> DiffusionModelConfig:
    """The model's settings for samples of this size (`drawing.drawn_as`)."""
    height, width, frames, *milliseconds = size  # samples that were kept by an older release have no sound
    seconds = milliseconds[0] / 1000 if any(milliseconds) else None
    pipeline = dataclasses.replace(
        model.pipeline, height=height, width=width, num_frames=frames or None, audio_duration_s=seconds
    )
    return model if pipeline == model.pipeline else dataclasses.replace(model, pipeline=pipeline)


def check_size(where: str, pipeline: DiffusionPipelineConfig, model: DiffusionModelConfig) -> None:
    """The model has latents of that size, or one line names its neighbours."""
    adapter = DiffusionModelBase.get_class(model)
    multiple = adapter.vae_scale_factor(dataclasses.replace(model, pipeline=pipeline)) * adapter.size_multiple
    for name in ("height", "width"):
        value = getattr(pipeline, name)
        if value < multiple or value % multiple:
            below = max(value // multiple, 1) * multiple
            raise ValueError(
                f"{where}{name}={value} is no multiple of {multiple} (vae_scale_factor * {adapter.size_multiple}): "
                f"try {below} or {below + multiple}"
            )


def check_steps(where: str, pipeline: DiffusionPipelineConfig, model: DiffusionModelConfig) -> None:
    """The model's noise schedule can be walked in so many steps: where it is stretched to its end, not in one, and
    where its last step does nothing, not in that alone."""
    asked, adapter = dataclasses.replace(model, pipeline=pipeline), DiffusionModelBase.get_class(model)
    scheduler = adapter.build_scheduler(asked)
    with np.errstate(all="ignore"):
        adapter.set_timesteps(scheduler, asked, "cpu")
    if not scheduler.sigmas.isfinite().all() or adapter.num_steps(asked) < 1:
        steps = pipeline.num_inference_steps
        raise ValueError(f"{where}num_inference_steps={steps}: expected more, for the noise schedule of this model")
