"""The reward of a predicted image: with a gradient, and in the arithmetic of a rollout."""

import pytest
import torch
from engine_cases import make_engine, make_rollout, model_config, roll_out
from tiny_models import tiny_checkpoint

from verl_omni.utils.errors import RunError
from verl_omni.workers.engine.noise_levels import NoiseLevels


def test_an_update_refuses_a_reward_without_a_gradient(process_group):
    """Whatever the loss adds to it, which would be trained on alone."""
    with pytest.raises(RunError, match="no gradient"):
        predicted(lambda pixels: pixels.mean(dim=(1, 2, 3)).detach())


def test_an_update_decodes_and_scores_in_the_arithmetic_of_a_rollout(process_group):
    """Not in that of the transformer's forward, which rounds what a reward multiplies."""
    seen = []

    def score(pixels):
        seen.append((pixels.flatten(1) @ torch.ones(pixels[0].numel(), 1)).dtype)
        return pixels.mean(dim=(1, 2, 3))

    assert predicted(score).requires_grad and seen == [torch.float32]


def predicted(score) -> torch.Tensor:
    """The rewards of two images that an engine in bfloat16 predicts."""
    engine = make_engine(model_config(tiny_checkpoint()), dtype="bfloat16")
    rollout = make_rollout(engine)
    engine.replay = NoiseLevels(engine)
    data = roll_out(engine, per_prompt=1, rollout=rollout)
    engine.replay.reward_of = rollout.with_reward(lambda pixels, told: score(pixels))
    engine.replay.told = [{}]
    clean = data.pop("final_latents")
    with engine.train_mode(), engine.autocast():
        return engine.replay.model_outputs(
            data
            | {"clean_latents": clean, "noise": torch.zeros_like(clean), "sigma": torch.full((len(clean),), 0.1)}
            | {"told": torch.zeros(len(clean), dtype=torch.long)}
        )["predicted_reward"]
