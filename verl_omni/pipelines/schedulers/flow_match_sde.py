"""diffusers' flow-matching Euler scheduler with stochastic reverse steps and their log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.utils import BaseOutput

from verl_omni.pipelines.schedulers.steps import get_step

Generators = torch.Generator | list[torch.Generator] | None


@dataclass
class FlowMatchSDEDiscreteSchedulerOutput(BaseOutput):
    """The four-tuple of ``sample_previous_step`` by name."""

    prev_sample: torch.Tensor
    log_prob: torch.Tensor
    prev_sample_mean: torch.Tensor
    std_dev_t: torch.Tensor


# The schedule of any flow-matching scheduler, an adapter's own too: all they need are its `timesteps` and `sigmas`.


def check_timesteps(scheduler: Any, timestep: torch.Tensor) -> None:
    """Refuse timesteps that are not in the schedule, by exact comparison in float32."""
    strangers = timestep[~torch.isin(timestep, scheduler.timesteps.to(timestep.device))].unique().tolist()
    if strangers:
        raise ValueError(
            f"timesteps {strangers} are not in the schedule {scheduler.timesteps.tolist()}: pass values of "
            "scheduler.timesteps, in float32"
        )


def step_sigmas(scheduler: Any, timestep: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """σ and σ' of the steps that start at these timesteps, float32: (B,) each, or (B, N) (`own_levels`).

    On a GPU a check would make the host wait for all work before: there a stranger's σ is NaN, and who has the
    timesteps in CPU memory calls `check_timesteps`.
    """
    if len(scheduler.sigmas) != len(scheduler.timesteps) + 1:
        raise RuntimeError("the scheduler has no schedule yet: call set_timesteps first")
    timestep = torch.as_tensor(timestep, dtype=torch.float32, device=scheduler.timesteps.device).reshape(-1)
    if timestep.device.type == "cpu":
        check_timesteps(scheduler, timestep)
    index, known = _index(scheduler, timestep)
    sigmas = scheduler.sigmas.to(index.device, torch.float32)
    sigma, sigma_next = torch.where(known, sigmas[index], torch.nan), sigmas[index + 1]
    return own_levels(scheduler, sigma), own_levels(scheduler, sigma_next)


def own_levels(scheduler: Any, sigma: torch.Tensor) -> torch.Tensor:
    """The noise levels of samples whose schedule is at σ (B,): (B, N) where their parts have their own, else σ."""
    levels_at = getattr(scheduler, "levels_at", None)  # an adapter's own scheduler may know of none
    return sigma if levels_at is None else levels_at(sigma)


def _index(scheduler: Any, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(which steps of the schedule start at these timesteps, whether there are such), (B,) each."""
    matches = timestep.to(scheduler.timesteps.device)[:, None] == scheduler.timesteps[None, :]
    return matches.int().argmax(dim=1), matches.any(dim=1)


def sqrt_neg_dt(scheduler: Any, timestep: torch.Tensor | float) -> torch.Tensor:
    """√(-dt) of the steps that start at these timesteps, of the shape of their σ."""
    sigma, sigma_next = step_sigmas(scheduler, timestep)
    return (sigma - sigma_next).sqrt()


def pulls(scheduler: Any, sde_type: str, noise_level: float) -> torch.Tensor:
    """How steeply each step's log-probability follows the velocity (`Step.pull`), of the schedule, in CPU memory."""
    sigmas = own_levels(scheduler, scheduler.sigmas.cpu().float())
    return get_step(sde_type).pull(sigmas[:-1], sigmas[1:], noise_level)


def of_steps(scheduler: Any, timestep: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of a value for each step of the schedule those of the steps that start at these timesteps."""
    index, _ = _index(scheduler, timestep.float())
    return values[index.to(values.device)]


class FlowMatchSDEDiscreteScheduler(FlowMatchEulerDiscreteScheduler):
    """Same schedule and config as the parent, plus ``sample_previous_step``. It keeps no state between two steps, so
    that the samples of one batch may be at different timesteps."""

    #: how much each of the latents (B, N, ...) counts in a log-probability: (N,), of mean 1; None: all the same
    log_prob_weights: torch.Tensor | None = None
    #: σ of the schedule (B,) -> those of each of the N entries of the latents' second dimension, (B, N), where parts of
    #: a sample are at noise levels of their own in every step; None: all at the schedule's
    levels_at: Callable[[torch.Tensor], torch.Tensor] | None = None

    def set_timesteps(self, *args, **kwargs) -> None:
        """As the parent's, for schedules that go from noise to data and hold each timestep once."""
        super().set_timesteps(*args, **kwargs)
        if not bool((self.timesteps.diff() < 0).all()):
            raise ValueError(f"timesteps have to decrease strictly, got {self.timesteps.tolist()}")

    def step_sigmas(self, timestep: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        """σ and σ' of the steps that start at these timesteps, float32: (B,) each, or (B, N) (`own_levels`)."""
        return step_sigmas(self, timestep)

    def sqrt_neg_dt(self, timestep: torch.Tensor | float) -> torch.Tensor:
        """√(-dt) of the steps that start at these timesteps, of the shape of their σ."""
        return sqrt_neg_dt(self, timestep)

    def sample_previous_step(
        self,
        sample: torch.Tensor,
        model_output: torch.Tensor,
        timestep: torch.Tensor | float,
        generator: Generators = None,
        noise_level: torch.Tensor | float = 0.7,
        prev_sample: torch.Tensor | None = None,
        sde_type: str = "sde",
        return_dict: bool = False,
    ) -> FlowMatchSDEDiscreteSchedulerOutput | tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One reverse step in float32, or, given ``prev_sample``, the likelihood of one that was taken before.

        Args:
            sample: x of shape (B, ...).
            model_output: velocity, of the same shape.
            timestep: values of ``self.timesteps``: one for all, or (B,), where each sample has its own.
            generator: one for the batch, or a list with one for each sample. Sample i then takes its noise from
                generator i only, on that generator's device, so that its path depends on nothing else in the batch.
            noise_level: one for all, or (B,), best kept in CPU memory. A sample with 0 takes the Euler step, draws
                nothing from its generator, and has log-probability 0.
            prev_sample: a stored x' to evaluate instead of drawing one; no gradient flows into it.
            sde_type: a registered step type: sde, cps, dance_sde, ode.

        Returns:
            ``(prev_sample, log_prob, prev_sample_mean, std_dev_t)``: log_prob (B,) is the mean over all other
            dimensions; std_dev_t (B, 1, ..., 1), or (B, N, 1, ..., 1) where parts have levels of their own, is the
            diffusion coefficient, so that the noise is std_dev_t·√(-dt)·z.
        """
        step = get_step(sde_type)
        sigma, sigma_next = (s.to(sample.device) for s in self.step_sigmas(timestep))
        mean, std_dev_t = step(sample, model_output, sigma, sigma_next, noise_level)
        if prev_sample is None:
            full_std = std_dev_t * (sigma - sigma_next).sqrt().reshape(-1, *std_dev_t.shape[1:])
            prev_sample = mean + full_std * drawn_noise(mean, generator, noise_level)
        prev_sample = prev_sample.detach().float()
        log_prob = step.log_prob(prev_sample, mean, std_dev_t, sigma, sigma_next, self.log_prob_weights)
        output = FlowMatchSDEDiscreteSchedulerOutput(prev_sample, log_prob, mean, std_dev_t)
        return output if return_dict else output.to_tuple()


def takes_own_steps(scheduler: Any) -> bool:
    """Whether this scheduler knows step types that are not registered: it says itself how it steps."""
    return type(scheduler).sample_previous_step is not FlowMatchSDEDiscreteScheduler.sample_previous_step


def drawn_noise(like: torch.Tensor, generator: Generators, noise_level: torch.Tensor | float) -> torch.Tensor:
    """Standard normal noise, 0 for samples with noise level 0."""
    size, *shape = like.shape
    levels = torch.as_tensor(noise_level).reshape(-1).expand(size).tolist()
    if not any(levels):
        return torch.zeros_like(like)
    if isinstance(generator, list | tuple):
        if len(generator) != size:
            raise ValueError(f"{len(generator)} generators for a batch of {size}: pass one for each sample")
        rows = [
            torch.randn(shape, generator=g, device=g.device).to(like.device) if level else like.new_zeros(shape)
            for g, level in zip(generator, levels, strict=True)
        ]
        return torch.stack(rows)
    device = like.device if generator is None else generator.device
    return torch.randn(like.shape, generator=generator, device=device).to(like.device)
