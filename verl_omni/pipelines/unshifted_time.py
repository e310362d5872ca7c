"""For models that are told a time which is not σ: their schedule shifts σ and leaves the time as it is."""

from typing import Any

import numpy as np
import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase


class UnshiftedTime(DiffusionModelBase):
    @classmethod
    def times(cls, steps: int, most: int) -> np.ndarray:
        """Of so many steps, from `most` on, before they are rounded."""
        return np.linspace(most, 1.0, steps)

    @classmethod
    def _mu(cls, scheduler: Any, model_config: DiffusionModelConfig) -> float:
        from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift

        defaults = {"base_image_seq_len": 256, "base_shift": 0.25, "max_shift": 0.75}
        given = (scheduler.config.get(name, value) for name, value in defaults.items())
        return calculate_shift(cls.tokens(model_config), *given)

    @classmethod
    def set_timesteps(cls, scheduler, model_config: DiffusionModelConfig, device: torch.device | str) -> None:
        most = scheduler.config.num_train_timesteps
        timesteps = cls.times(model_config.pipeline.num_inference_steps, most).astype(np.int64).astype(np.float32)
        mu = cls._mu(scheduler, model_config)
        scheduler.set_timesteps(timesteps=timesteps, sigmas=timesteps / most, mu=mu, device=device)

    @classmethod
    def timestep_at(cls, sigma: torch.Tensor, scheduler: Any, model_config: DiffusionModelConfig) -> torch.Tensor:
        config, shift = scheduler.config, scheduler.config.shift
        if config.use_dynamic_shifting:
            mu = cls._mu(scheduler, model_config)
            shift = mu if config.time_shift_type == "linear" else np.exp(mu)
        return config.num_train_timesteps * sigma / (sigma + shift * (1 - sigma))
