import copy

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLWan

from verl_omni.pipelines.single_frame_vae import speed_up_single_frames

SMALL = dict(base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True])


@pytest.fixture(params=[AutoencoderKLQwenImage, AutoencoderKLWan])
def vae(request):
    torch.manual_seed(0)
    return request.param(**SMALL)


def through(vae, video):
    latents = vae.encode(video).latent_dist.mode()
    return latents, vae.decode(latents).sample


@pytest.mark.parametrize("frames", [1, 5])
def test_gives_what_the_ordinary_vae_gives(vae, frames):
    video = torch.rand(2, 3, frames, 32, 48) * 2 - 1
    with torch.no_grad():
        expected = through(vae, video)
        for ours, theirs in zip(through(speed_up_single_frames(vae), video), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_gives_the_same_gradients(vae):
    fast = speed_up_single_frames(copy.deepcopy(vae))
    image = torch.rand(1, 3, 1, 16, 16) * 2 - 1
    for model in (vae, fast):
        through(model, image)[1].square().mean().backward()
    for (name, ours), theirs in zip(fast.named_parameters(), vae.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_single_frames_never_reach_the_3d_convolution(vae, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("conv3d was called")

    monkeypatch.setattr(torch.nn.functional, "conv3d", refuse)
    image = torch.zeros(1, 3, 1, 16, 16)
    with pytest.raises(AssertionError):
        through(vae, image)
    through(speed_up_single_frames(vae), image)


def test_saves_as_before(vae, tmp_path):
    speed_up_single_frames(vae).save_pretrained(tmp_path)
    again = type(vae).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), vae.parameters(), strict=True))
