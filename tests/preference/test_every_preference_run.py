"""Every loss on two architectures, LoRA and full, with one process and with two: the real command, the same weights.

`pytest -m slow tests/preference` runs them (ten minutes or so); test_preference_ranks.py compares the update itself.
"""

from pathlib import Path

import pytest
import torch
from e2e_runs import Run, metrics, settings
from safetensors.torch import load_file
from tiny_models import tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

# Coarse, so that a pixel that rounds the other way changes no reward.
BRIGHTNESS = """
def compute_score(image):
    pixels = list(image.convert("L").getdata())
    return round(sum(pixels) / len(pixels) / 255, 2)
"""
OF_PIXELS = """
from verl_omni.rewards.differentiable import differentiable

@differentiable
def compute_score(pixels, prompt):  # another one's prompt would be seen in the weights
    return (1 - (pixels.mean(dim=(1, 2, 3)) - 0.8).square()) * len(prompt)
"""


def trained(algorithm: str, architecture: str, lora: bool, processes: int, folder: Path) -> dict[str, torch.Tensor]:
    run_dir = folder / f"run{processes}"
    (folder / "brightness.py").write_text(OF_PIXELS if algorithm == "draft" else BRIGHTNESS)
    arguments = settings(
        run_dir,
        f"actor_rollout_ref.model.algorithm={algorithm}",
        f"actor_rollout_ref.model.lora_rank={4 if lora else 0}",
        *["actor_rollout_ref.rollout.pipeline.guidance_scale=1"] * (architecture == "StableDiffusion3Pipeline"),
        "algorithm.timesteps_per_sample=2",
        "reward.custom_reward_function.path=brightness.py",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        # With the usual 1e-8 an element whose gradient is rounding noise moves by a whole learning rate.
        "actor_rollout_ref.actor.optim.eps=1e-3",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
        "trainer.test_freq=0",
        f"trainer.n_gpus_per_node={processes}",
        model=tiny_checkpoint(architecture),
    )
    Run(arguments, folder).succeed()
    assert metrics(run_dir)[2]["actor/grad_norm"] > 0
    files = sorted((run_dir / "global_step_2" / "export").rglob("*.safetensors"))
    return {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("architecture", ["QwenImagePipeline", "StableDiffusion3Pipeline"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("algorithm", ["dpo", "diffusion_nft", "awm", "dgpo", "crd", "draft"])
def test_one_process_and_two_agree(algorithm, architecture, lora, tmp_path):
    one, two = (trained(algorithm, architecture, lora, processes, tmp_path) for processes in (1, 2))
    assert one.keys() == two.keys() and one
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
