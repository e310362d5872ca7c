"""The denoising loop. It exists once: model adapters say how a velocity is made, schedulers how a step is taken."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from verl_omni.algorithms.base import column
from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.schedulers.flow_match_sde import drawn_noise, sqrt_neg_dt
from verl_omni.utils.errors import RequestAborted


@dataclass
class Trajectory:
    """What training needs of a rollout, in float32: the steps inside each sample's SDE window, and the end."""

    final_latents: torch.Tensor  # (B, ...)
    latents: torch.Tensor  # (B, W + 1, ...): before each stored step, and after the last
    timesteps: torch.Tensor  # (B, W)
    log_probs: torch.Tensor  # (B, W)
    means: torch.Tensor | None = None  # (B, W, ...), where the loss asks for them
    uncond: torch.Tensor | None = None  # (B, W, ...), the unguided half of the velocity, to spare training that forward

    def rows(self) -> list[dict[str, torch.Tensor]]:
        """One dict a sample, under the names that the batch carries them by; without stored steps only the end."""
        fields = {"final_latents": self.final_latents}
        if self.timesteps.shape[1]:
            fields |= {
                "all_latents": self.latents,
                "all_timesteps": self.timesteps,
                "rollout_log_probs": self.log_probs,
                "old_prev_sample_mean": self.means,
                "uncond_velocity": self.uncond,
            }
        held = {k: v for k, v in fields.items() if v is not None}
        return [{k: v[i] for k, v in held.items()} for i in range(len(self.final_latents))]


def as_micro_batch(conditions: Conditions) -> dict[str, torch.Tensor | None]:
    """The four documented text fields, absent ones None, and whatever else the model's text encoder returned."""
    names = ("prompt_embeds", "prompt_embeds_mask", "negative_prompt_embeds", "negative_prompt_embeds_mask")
    return dict.fromkeys(names) | conditions


def transformer_inputs(
    adapter: type[DiffusionModelBase],
    module: torch.nn.Module,
    model_config: DiffusionModelConfig,
    latents: torch.Tensor,
    timesteps: torch.Tensor,
    conditions: Conditions,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What the transformer is called with for samples (B, ...) at timesteps (B,)."""
    batch = as_micro_batch(conditions)
    return adapter.prepare_model_inputs(
        module,
        model_config,
        latents=latents[:, None],
        timesteps=timesteps[:, None],
        prompt_embeds=batch["prompt_embeds"],
        prompt_embeds_mask=batch["prompt_embeds_mask"],
        negative_prompt_embeds=batch["negative_prompt_embeds"],
        negative_prompt_embeds_mask=batch["negative_prompt_embeds_mask"],
        micro_batch=batch,
        step=0,
    )


def halves(
    adapter: type[DiffusionModelBase],
    module: torch.nn.Module,
    positive: dict[str, Any],
    negative: dict[str, Any],
    one_forward: bool,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both halves of CFG with their `velocity`: of one forward, if that is wanted and their shapes agree, or of two."""
    both = joined(positive, negative, adapter.rowless_inputs) if one_forward else None
    if both is None:  # first the half that is trained: by its sizes the update's graphs are compiled ahead
        cond, uncond = (adapter.forward(module, half).float() for half in (positive, negative))
    else:
        cond, uncond = adapter.forward(module, both).float().chunk(2)
    return positive | {"velocity": cond}, negative | {"velocity": uncond}


def joined(one: dict[str, Any], other: dict[str, Any], rowless: tuple[str, ...]) -> dict[str, Any] | None:
    """The rows of both as one batch; None where they differ in more than their values."""
    if one.keys() != other.keys():
        return None
    both = {}
    for name, first in one.items():
        second = other[name]
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            if first.shape != second.shape:  # prompts of different lengths
                return None
            both[name] = first if name in rowless else torch.cat([first, second])
        elif isinstance(first, list):
            both[name] = first + second
        elif first is second:  # such as no mask
            both[name] = first
        else:
            return None
    return both


def step_by_adapter(
    adapter: type[DiffusionModelBase],
    module: torch.nn.Module,
    scheduler: Any,
    model_config: DiffusionModelConfig,
    inputs: dict[str, Any],
    negative: dict[str, Any] | None,
    sample: torch.Tensor,
    timestep: torch.Tensor,
    generators: list[torch.Generator],
    noise_level: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x', log-probability, mean) by an adapter's own `forward_and_sample_previous_step`, which judges steps only.

    x' is drawn from the mean and the `std_dev_t` that it gives, and then judged, so that rollout and training share the
    formula; that takes a second forward. At noise level 0 x' is the mean.
    """

    def judged(x_next: torch.Tensor, level: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config = dataclasses.replace(model_config, algo=dataclasses.replace(model_config.algo, noise_level=level))
        step = {"sample": sample, "prev_sample": x_next, "timestep": timestep}
        return adapter.forward_and_sample_previous_step(module, scheduler, config, inputs, negative, step, step=0)

    root = column(sqrt_neg_dt(scheduler, timestep).to(sample.device), sample)
    drawn, log_probs, means = torch.empty_like(sample), sample.new_zeros(len(sample)), torch.empty_like(sample)
    for level in noise_level.unique().tolist():
        chosen = noise_level == level
        _, mean, std_dev_t = judged(sample, level)
        x_next = mean
        if level:
            noise = drawn_noise(mean, generators, chosen.float())
            x_next = mean + std_dev_t * root * noise
            rows = chosen.to(sample.device)
            log_probs = torch.where(rows, judged(x_next, level)[0], log_probs)
        rows = column(chosen.to(sample.device), sample)
        drawn, means = torch.where(rows, x_next, drawn), torch.where(rows, mean, means)
    return drawn, log_probs, means


def parted(latents: torch.Tensor, step: int, windows: list[tuple[int, int]], branch_of: list[int]) -> torch.Tensor:
    """Samples whose window begins at this step stand where the one stands with which they have walked."""
    parting = [row for row, (start, _) in enumerate(windows) if start == step and branch_of[row] != row]
    if not parting:
        return latents
    index = list(range(len(latents)))
    for row in parting:
        index[row] = branch_of[row]
    return latents[torch.tensor(index).to(latents.device, non_blocking=True)]


@torch.no_grad()
def denoise(
    adapter: type[DiffusionModelBase],
    module: torch.nn.Module,
    scheduler: Any,
    model_config: DiffusionModelConfig,
    latents: torch.Tensor,
    conditions: Conditions,
    generators: list[torch.Generator],
    windows: list[tuple[int, int]],
    keep_means: bool = False,
    keep_uncond: bool = False,
    cfg_in_one_forward: bool = True,
    wanted: Callable[[], bool] = lambda: True,
    branch_of: list[int] | None = None,
) -> Trajectory:
    """Walk from noise to data: stochastic inside each sample's window [start, end), the Euler ODE outside.

    All windows have one length, so that the stored steps stack; they may lie at different places. `wanted` is asked
    before each step: where nobody waits for the samples any more, none is made. `branch_of` names for each sample the
    one whose way it goes until its window begins, itself where it goes alone: up to there it costs nothing.
    """
    own_step = adapter.has_own_step()
    keep_uncond = keep_uncond and not own_step  # only it knows what it does with the halves
    size = len(latents)
    length = windows[0][1] - windows[0][0]
    algo = model_config.algo
    stored = latents.new_zeros(size, length + 1, *latents.shape[1:])
    means = latents.new_zeros(size, length, *latents.shape[1:]) if keep_means else None
    unconds = latents.new_zeros(size, length, *latents.shape[1:]) if keep_uncond else None
    log_probs = latents.new_zeros(size, length)
    timesteps = scheduler.timesteps.new_zeros(size, length)

    for i, t in enumerate(scheduler.timesteps):
        if not wanted():
            raise RequestAborted("nobody waits for these samples any more")
        inside = [row for row, (start, end) in enumerate(windows) if start <= i < end]
        moving = list(range(size))
        if branch_of is not None:
            latents = parted(latents, i, windows, branch_of)
            moving = [row for row in moving if branch_of[row] == row or i >= windows[row][0]]
        noise_level = torch.zeros(size)
        noise_level[inside] = algo.noise_level
        # Indices that are lists would make the host wait for the device at each use.
        rows, slots, among = (
            torch.tensor(index, dtype=torch.long).to(latents.device, non_blocking=True)
            for index in (inside, [i - windows[row][0] for row in inside], [moving.index(row) for row in inside])
        )
        if inside:
            stored[rows, slots] = latents[rows]
            timesteps[rows, slots] = t
        everybody, own, theirs = latents, conditions, generators
        if len(moving) < size:
            chosen = torch.tensor(moving).to(latents.device, non_blocking=True)
            latents, noise_level = latents[chosen], noise_level[moving]
            own, theirs = {name: value[chosen] for name, value in own.items()}, [theirs[row] for row in moving]
        step = t.expand(len(moving))
        inputs, negative = transformer_inputs(adapter, module, model_config, latents, step, own)
        if own_step:
            latents, log_prob, mean = step_by_adapter(
                adapter, module, scheduler, model_config, inputs, negative, latents, step, theirs, noise_level
            )
        else:
            if negative is not None:
                inputs, negative = halves(adapter, module, inputs, negative, cfg_in_one_forward)
                if inside and keep_uncond:
                    unconds[rows, slots] = negative["velocity"][among]
            latents, log_prob, mean, _ = scheduler.sample_previous_step(
                sample=latents,
                model_output=adapter.predict_velocity(module, model_config, inputs, negative),
                timestep=step,
                generator=theirs,
                noise_level=noise_level,
                sde_type=algo.sde_type,
            )
        if inside:
            log_probs[rows, slots] = log_prob[among]
            stored[rows, slots + 1] = latents[among]
            if keep_means:
                means[rows, slots] = mean[among]
        if len(moving) < size:
            latents = everybody.index_copy(0, chosen, latents)
    return Trajectory(latents, stored, timesteps, log_probs, means, unconds)
