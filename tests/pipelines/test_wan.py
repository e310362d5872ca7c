"""What only Wan has: UniPC folders, a timestep for each token, frames."""

import dataclasses
import shutil
from types import SimpleNamespace

import pytest
import test_architectures as architectures
import torch
from diffusers import UniPCMultistepScheduler
from tiny_models import tiny_checkpoint

from verl_omni.pipelines.wan import Wan
from verl_omni.pipelines.wan.adapter import Experts
from verl_omni.workers.engine.base import DiffusionEngine
from verl_omni.workers.engine.noise_levels import NoiseLevels
from verl_omni.workers.engine.reverse_steps import ReverseSteps
from verl_omni.workers.layout import Layout

ROWS = {row.name: row for row in architectures.TABLE}


def test_a_unipc_folder_keeps_its_noise_schedule(tmp_path):
    shutil.copytree(tiny_checkpoint("WanPipeline"), tmp_path, dirs_exist_ok=True)
    upstream = UniPCMultistepScheduler(
        use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction", num_train_timesteps=1000
    )
    upstream.save_pretrained(tmp_path / "scheduler")
    model_config = dataclasses.replace(architectures.config(ROWS["WanPipeline"], cfg=True), path=str(tmp_path))
    ours = Wan.build_scheduler(model_config)
    for steps in (4, 20):
        model_config.pipeline.num_inference_steps = steps
        Wan.set_timesteps(ours, model_config, "cpu")
        upstream.set_timesteps(steps)
        torch.testing.assert_close(ours.sigmas, upstream.sigmas, atol=2e-6, rtol=0)
        torch.testing.assert_close(ours.timesteps, upstream.timesteps.float(), atol=1.0, rtol=0)


def test_frames_that_wan_cannot_make_are_an_error():
    model_config = architectures.config(ROWS["WanPipeline"], cfg=True)
    Wan.check(model_config)
    model_config.pipeline.num_frames = 16
    with pytest.raises(ValueError, match=r"num_frames=16: Wan makes 4k \+ 1 frames, such as 17"):
        Wan.check(model_config)


@pytest.mark.parametrize("counted", [("transformer",), ("transformer_2",), ("transformer", "transformer_2")])
@pytest.mark.parametrize("kind", [NoiseLevels, ReverseSteps])
def test_an_expert_that_only_fillers_reached_has_no_gradient(kind, counted):
    """Both ran. The first two samples are the high-noise expert's, the others the low-noise one's."""
    experts = Experts(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1), boundary=900.0)
    for parameter in experts.parameters():
        parameter.grad = torch.zeros_like(parameter)
    sigma = torch.tensor([[0.95, 0.99], [1.0, 0.9], [0.1, 0.89], [0.2, 0.3]])
    share = torch.tensor([name in counted for name in experts for _ in range(2)]).double() / (2 * len(counted))
    share = share if kind is NoiseLevels else share[:, None].expand(4, 2) / 2  # of a sample; of each of its steps
    replay = kind.__new__(kind)
    replay.engine = SimpleNamespace(adapter=Wan)
    replay._drawn = {(None, None): (None, SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000)))}
    held = SimpleNamespace(
        parts=dict(experts.items()), module=experts, adapter=Wan, layout=Layout(), device="cpu", replay=replay
    )
    DiffusionEngine.drop_idle_gradients(held, {"sigma": sigma, "all_timesteps": 1000 * sigma, "share": share})
    assert tuple(name for name, part in experts.items() if part.weight.grad is not None) == counted
