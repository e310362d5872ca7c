"""CLIP, SigLIP and PickScore: the models' own embeddings, and the formula of paper or model card written out."""

import re
import shutil

import numpy as np
import pytest
import torch
from hub_mirror import mirror  # noqa: F401
from PIL import Image
from tiny_scorers import (
    PROMPTS,
    SIDE,
    check_of_pixels,
    clip_folder,
    clip_pixels,
    clip_words,
    pictures,
    randomise,
    siglip_folder,
    siglip_tokenizer,
    unit,
)
from transformers import Siglip2Config, Siglip2ImageProcessorPil, Siglip2Model

from verl_omni.rewards import make_scorer

WORDS = {word: number for number, word in enumerate(clip_words())}


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    return folder, clip_folder(folder, seed=4).double()  # cosines of both signs


@pytest.fixture(scope="module")
def siglip(tmp_path_factory):
    folder = tmp_path_factory.mktemp("siglip")
    return folder, siglip_folder(folder).double()


def cosines(model, pixels: list[np.ndarray], ids: list[list[int]]) -> np.ndarray:
    """By the model's own classes, in float64."""
    with torch.no_grad():
        images = model.get_image_features(pixel_values=torch.from_numpy(np.stack(pixels))).pooler_output
        texts = torch.cat([model.get_text_features(input_ids=torch.tensor([row])).pooler_output for row in ids])
    return (unit(images.numpy()) * unit(texts.numpy())).sum(-1)


def clip_ids(prompt: str, limit: int = 77) -> list[int]:
    """Start, letters, end, with nothing behind it; the last letter of each word is another token."""
    ids = [WORDS["<|startoftext|>"]]
    for word in re.findall(r"[a-z]+|[0-9]|,", prompt.lower()):
        ids += [WORDS[letter] for letter in word[:-1]] + [WORDS[f"{word[-1]}</w>"]]
    return ids[: limit - 1] + [WORDS["<|endoftext|>"]]


def test_clip_score_is_the_logit_over_30_or_that_of_the_paper(clip):
    folder, model = clip
    images = pictures()
    expected = cosines(model, [clip_pixels(image) for image in images], [clip_ids(prompt) for prompt in PROMPTS])
    assert expected.min() < 0 < expected.max()  # so that max(cos, 0) is seen
    answers = make_scorer("clip_score", {"model": str(folder)})(images, [None] * 3, PROMPTS, [{}] * 3)
    scale = np.exp(model.logit_scale.item())
    assert [a["cosine"] for a in answers] == pytest.approx(expected, abs=1e-5)
    assert [a["score"] for a in answers] == pytest.approx(scale * expected / 30, abs=1e-5)
    answers = make_scorer("clip_score", {"model": str(folder), "scale": "paper"})(images, None, PROMPTS, None)
    assert [a["score"] for a in answers] == pytest.approx(2.5 * np.maximum(expected, 0), abs=1e-5)


def test_pickscore_is_the_models_logit_and_flow_grpo_divides_it(clip, tmp_path):
    folder, _ = clip
    tuned = clip_folder(tmp_path, seed=1).double()
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        (tmp_path / name).unlink()  # they come from the CLIP that it began as
    images = pictures()
    expected = cosines(tuned, [clip_pixels(image) for image in images], [clip_ids(prompt) for prompt in PROMPTS])
    expected *= np.exp(tuned.logit_scale.item())
    settings = {"model": str(tmp_path), "processor": str(folder)}
    answers = make_scorer("pickscore", settings)(images, None, PROMPTS, None)
    assert [a["score"] for a in answers] == pytest.approx(expected, abs=1e-4)
    answers = make_scorer("pickscore", settings | {"divide_by": 26})(images, None, PROMPTS, None)
    assert [a["score"] for a in answers] == pytest.approx(expected / 26, abs=1e-5)


def siglip_ids(prompt: str, words: dict[str, int], limit: int = 24) -> list[int]:
    letters = [words[letter] for letter in prompt.lower().replace(" ", "▁")]
    return (letters[: limit - 1] + [words["<eos>"]] + [words["<pad>"]] * limit)[:limit]


def test_siglip_score_is_the_models_probability_or_the_cosine(siglip, tmp_path):
    folder, model = siglip
    images = pictures()
    squeezed = [image.resize((SIDE, SIDE), Image.Resampling.BILINEAR) for image in images]
    pixels = [(np.array(image, np.float64).transpose(2, 0, 1) / 255 - 0.5) / 0.5 for image in squeezed]
    words = siglip_tokenizer(tmp_path).get_vocab()
    expected = cosines(model, pixels, [siglip_ids(prompt, words) for prompt in PROMPTS])
    answers = make_scorer("siglip_score", {"model": str(folder)})(images, None, PROMPTS, None)
    logits = np.exp(model.logit_scale.item()) * expected + model.logit_bias.item()
    assert [a["cosine"] for a in answers] == pytest.approx(expected, abs=1e-5)
    assert [a["score"] for a in answers] == pytest.approx(1 / (1 + np.exp(-logits)), abs=1e-5)
    answers = make_scorer("siglip_score", {"model": str(folder), "scale": "cosine"})(images, None, PROMPTS, None)
    assert [a["score"] for a in answers] == pytest.approx(expected, abs=1e-5)


@pytest.fixture
def siglip_2(tmp_path):
    """For images of any shape, in patches."""
    words = siglip_tokenizer(tmp_path)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(words), "max_position_embeddings": 24, "bos_token_id": None, "eos_token_id": 1}
    vision = tower | {"num_patches": 16, "patch_size": 8}
    model = randomise(Siglip2Model(Siglip2Config(text_config=tower | tokens, vision_config=vision)))
    model.save_pretrained(tmp_path)
    prepare = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    prepare.save_pretrained(tmp_path)
    return tmp_path, words, model, prepare


def test_siglip_2_for_images_of_any_shape(siglip_2):
    folder, words, model, prepare = siglip_2
    images = pictures()
    answers = make_scorer("siglip_score", {"model": str(folder)})(images, None, PROMPTS, None)
    for image, prompt, answer in zip(images, PROMPTS, answers, strict=True):
        ids = torch.tensor([siglip_ids(prompt, words.get_vocab())])
        with torch.no_grad():
            logit = model(input_ids=ids, **prepare(images=[image], return_tensors="pt")).logits_per_image.item()
        assert answer["score"] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "fixture", "settings", "near"),
    [
        ("clip_score", "clip", {}, 5e-3),
        ("pickscore", "clip", {}, 0.15),  # 30 times as large as that
        ("siglip_score", "siglip", {"scale": "cosine"}, 1e-2),
        ("siglip_score", "siglip", {"scale": "probability"}, 5e-3),
        ("siglip_score", "siglip_2", {"scale": "cosine"}, 5e-3),
    ],
)
def test_pixels_have_the_same_score_and_a_gradient(name, fixture, settings, near, request):
    folder = str(request.getfixturevalue(fixture)[0])
    given = {"model": folder} | ({"processor": folder} if name == "pickscore" else {})
    check_of_pixels(make_scorer(name, given | settings), near)


@pytest.mark.parametrize("name", ["clip_score", "siglip_score"])
def test_a_batch_is_scored_as_its_images_one_by_one(name, clip, siglip):
    folder = (clip if name == "clip_score" else siglip)[0]
    scorer = make_scorer(name, {"model": str(folder)})
    together = scorer(pictures(), None, PROMPTS, None)
    alone = [scorer([image], None, [prompt], None)[0] for image, prompt in zip(pictures(), PROMPTS, strict=True)]
    in_twos = make_scorer(name, {"model": str(folder), "batch_size": 2})(pictures(), None, PROMPTS, None)
    for key in ("score", "cosine"):
        assert [a[key] for a in together] == pytest.approx([a[key] for a in alone], abs=1e-5)
        assert [a[key] for a in together] == pytest.approx([a[key] for a in in_twos], abs=1e-5)
    assert len({round(a["score"], 6) for a in together}) == 3
    swapped = scorer(pictures(), None, [PROMPTS[1], PROMPTS[0], PROMPTS[0]], None)
    assert swapped[0]["score"] != pytest.approx(together[0]["score"], abs=1e-4)
    assert swapped[2] == pytest.approx(scorer(pictures()[2:], None, PROMPTS[:1], None)[0], abs=1e-5)


def test_what_comes_after_the_limit_of_siglip_does_not_count(siglip):
    scorer = make_scorer("siglip_score", {"model": str(siglip[0])})
    (image,) = pictures((40, 40))
    # 24 places: 23 letters and the end token
    prompts = ["abcdefgh" * 20, ("abcdefgh" * 20)[:23], ("abcdefgh" * 20)[:22]]
    long, whole, shorter = scorer([image] * 3, None, prompts, None)
    assert long == pytest.approx(whole, abs=1e-6)
    assert long["cosine"] != pytest.approx(shorter["cosine"], abs=1e-4)


def test_what_comes_after_the_limit_of_clip_does_not_count(clip):
    folder, model = clip
    (image,) = pictures((40, 40))
    prompt = "a b c " * 40
    (answer,) = make_scorer("clip_score", {"model": str(folder)})([image], None, [prompt], None)
    ids = clip_ids(prompt)
    assert len(ids) == 77
    assert answer["cosine"] == pytest.approx(cosines(model, [clip_pixels(image)], [ids])[0], abs=1e-5)


def test_a_video_has_the_mean_score_of_its_frames(clip):
    frames = pictures(*[(40, 40)] * 5)
    scorer = make_scorer("clip_score", {"model": str(clip[0])})
    alone = [a["score"] for a in scorer(frames, None, PROMPTS[:1] * 5, None)]
    video, image = scorer([frames, frames[0]], None, PROMPTS[:1] * 2, None)
    assert video["score"] == pytest.approx(np.mean(alone), abs=1e-5)
    assert image["score"] == pytest.approx(alone[0], abs=1e-5)
    scorer = make_scorer("clip_score", {"model": str(clip[0]), "frames": 1})
    assert scorer([frames], None, PROMPTS[:1], None)[0]["score"] == pytest.approx(alone[2], abs=1e-5)


def test_half_precision_is_used_and_near(clip):
    exact = make_scorer("clip_score", {"model": str(clip[0])})(pictures(), None, PROMPTS, None)
    scorer = make_scorer("clip_score", {"model": str(clip[0]), "dtype": "bfloat16"})
    assert scorer.model.dtype == torch.bfloat16
    rough = scorer(pictures(), None, PROMPTS, None)
    assert [a["cosine"] for a in rough] == pytest.approx([a["cosine"] for a in exact], abs=0.05)
    assert rough != exact


def test_a_model_by_its_name_on_the_hub(clip, tmp_path, mirror):  # noqa: F811
    folder = shutil.copytree(clip[0], tmp_path / "clip")
    (folder / "pytorch_model.bin").write_text("a pickle")
    mirror.add("somebody/clip", folder)
    named, local = (
        make_scorer("clip_score", {"model": model})(pictures(), None, PROMPTS, None)
        for model in ("somebody/clip", str(folder))
    )
    assert named == local and "model.safetensors" in mirror.asked and "pytorch_model.bin" not in mirror.asked
