"""Direct reward gradients through several steps, against diffusers' own transformer and Euler scheduler."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from preference_cases import STEPS, make_batch, make_engine
from test_preference_engine import QWEN, SD3, load_transformer, plain_velocity
from tiny_models import tiny_checkpoint

from verl_omni.algorithms.forward_process import level_starts


def euler(architecture: str, transformer: torch.nn.Module, data: dict, row: int, sigmas: torch.Tensor) -> torch.Tensor:
    """Where diffusers' scheduler ends that steps from the first of these levels through the others to 0."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=sigmas.numpy())
    x = (1 - sigmas[0]) * data["clean_latents"][row] + sigmas[0] * data["noise"][row]
    for t, sigma in zip(scheduler.timesteps, sigmas, strict=True):
        x = scheduler.step(plain_velocity(architecture, transformer, x, sigma, data, row), t, x, return_dict=False)[0]
    return x


@pytest.mark.parametrize("architecture", [QWEN, SD3])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_steps_and_gradient_are_those_of_diffusers(architecture, steps, process_group):
    """Rows start at any level that so many steps can follow."""
    engine = make_engine(tiny_checkpoint(architecture), "draft")
    data = make_batch(engine)
    rows, schedule, ends = len(data["sigma"]), engine.replay.scheduler.sigmas[:STEPS], []
    starts = torch.arange(rows) % len(level_starts(schedule, steps))
    data |= {"sigma": schedule[starts], "noise": torch.randn(data["clean_latents"].shape)}

    def reward(clean, config, told):
        ends.append(clean.detach())
        return -clean.flatten(1).square().mean(dim=1)

    engine.replay.reward_of, engine.replay.told, engine.replay.chained = reward, [{}] * rows, steps
    with engine.train_mode():
        (-engine.replay.model_outputs(data)["predicted_reward"].mean()).backward()
        gradient = {name: p.grad.clone() for name, p in engine.parameters.items() if p.grad is not None}
    transformer = load_transformer(architecture, engine.module.state_dict())
    expected = [euler(architecture, transformer, data, row, schedule[i : i + steps]) for row, i in enumerate(starts)]
    torch.stack(expected).square().mean().backward()
    torch.testing.assert_close(ends[0], torch.stack(expected).detach(), atol=1e-5, rtol=0)
    of_diffusers = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    assert gradient.keys() == of_diffusers.keys()
    scale = max(grad.abs().max() for grad in of_diffusers.values())
    for name, grad in of_diffusers.items():
        torch.testing.assert_close(gradient[name], grad, atol=1e-5 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
