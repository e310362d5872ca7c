"""LAION's aesthetic predictor: CLIP's embedding of the image at length 1, then five linear layers."""

import numpy as np
import pytest
import torch
from published_networks import head
from tiny_scorers import clip_folder, clip_pixels, pictures, unit

from verl_omni.rewards import make_scorer
from verl_omni.utils.errors import RunError

SIZES = (768, 1024, 128, 64, 16, 1)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A CLIP whose embeddings are as wide as those of ViT-L/14, and a predictor with the published shapes."""
    folder = tmp_path_factory.mktemp("aesthetic")
    clip = clip_folder(folder, projection_dim=768)
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for number, inputs, outputs in zip((0, 2, 4, 6, 7), SIZES, SIZES[1:], strict=False):
        weights[f"layers.{number}.weight"] = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        weights[f"layers.{number}.bias"] = torch.randn(outputs, generator=generator)
    torch.save(weights, folder / "sac+logos+ava1-l14-linearMSE.pth")
    return folder, clip.double(), weights


def make(folder, **settings):
    given = {"model": str(folder / "sac+logos+ava1-l14-linearMSE.pth"), "clip": str(folder)}
    return make_scorer("aesthetic", given | settings)


def test_score_is_that_of_the_published_formula(published):
    folder, clip, weights = published
    images = pictures()
    with torch.no_grad():
        pixels = torch.from_numpy(np.stack([clip_pixels(image) for image in images]))
        embedded = unit(clip.get_image_features(pixel_values=pixels).pooler_output.numpy())
    arrays = {key: value.double().numpy() for key, value in weights.items()}
    wanted = [head(arrays, row) for row in embedded]
    scorer = make(folder)
    answers = scorer(images, None, None, None)
    assert [a["score"] for a in answers] == pytest.approx(wanted, abs=1e-5)
    assert np.std(wanted) > 1e-3
    assert [scorer([image])[0]["score"] for image in images] == pytest.approx(wanted, abs=1e-5)


def test_pixels_have_the_same_score_and_a_gradient(published):
    """Pixels are prepared in torch there, by PIL and in 256 steps here."""
    scorer = make(published[0])
    for image in pictures():
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float().div(255).requires_grad_()
        score = scorer.of_pixels(pixels)
        assert score.item() == pytest.approx(scorer([image])[0]["score"], abs=0.02)
        (gradient,) = torch.autograd.grad(score.sum(), pixels)
        assert gradient.isfinite().all() and gradient.any()


def test_the_prompt_does_not_matter(published):
    scorer = make(published[0])
    assert scorer(pictures(), None, ["a", "", None], None) == scorer(pictures(), None, None, None)


def test_a_predictor_for_another_clip_is_refused(published, tmp_path):
    folder, _, weights = published
    clip_folder(tmp_path)
    with pytest.raises(RunError, match=r"embeddings of width 768, and those of clip=.* have 16"):
        make(folder, clip=str(tmp_path))
    for gone, told in (("layers.2.bias", "it lacks layers.2.bias"), ("layers.7.weight", "it lacks layers.7.weight")):
        torch.save({key: value for key, value in weights.items() if key != gone}, tmp_path / "less.pth")
        with pytest.raises(RunError, match=told):
            make(folder, model=str(tmp_path / "less.pth"))
    torch.save(weights | {"layers.8.weight": torch.ones(1)}, tmp_path / "more.pth")
    with pytest.raises(RunError, match="it has layers.8.weight"):
        make(folder, model=str(tmp_path / "more.pth"))
    with pytest.raises(RunError, match='reward.scorers.aesthetic.clip="nobody/nothing"'):
        make(folder, clip="nobody/nothing")
