"""ImageReward from a checkpoint with its published names, against the network written out in numpy."""

import numpy as np
import pytest
import torch
from published_networks import image_reward
from tiny_scorers import CLIP_MEAN, CLIP_STD, PROMPTS, bert_tokenizer, check_of_pixels, clip_pixels, pictures
from transformers import BlipTextModel, BlipVisionModel

from verl_omni.rewards import make_scorer
from verl_omni.rewards.published_weights import check_names, linear_head
from verl_omni.rewards.scorers.image_reward import (
    HEAD,
    centre_square,
    split,
    text_config,
    text_name,
    vision_config,
    vision_name,
)
from verl_omni.utils.errors import RunError

LAYERS, SIDE = 2, 32


def shapes(layers: tuple[int, int], vision: int, text: int, patch: int, grid: int, words: int, places: int) -> dict:
    """Names and shapes of ImageReward.pt."""
    v, t = "blip.visual_encoder.", "blip.text_encoder."
    found = {
        f"{v}cls_token": (1, 1, vision),
        f"{v}pos_embed": (1, grid**2 + 1, vision),
        f"{v}patch_embed.proj.weight": (vision, 3, patch, patch),
        f"{v}patch_embed.proj.bias": (vision,),
        f"{t}embeddings.position_ids": (1, places),
        f"{t}embeddings.word_embeddings.weight": (words, text),
        f"{t}embeddings.position_embeddings.weight": (places, text),
        "blip.vision_proj.weight": (256, vision),
        "blip.vision_proj.bias": (256,),
        "blip.text_proj.weight": (256, text),
        "blip.text_proj.bias": (256,),
    }

    def linear(name: str, inputs: int, outputs: int) -> None:
        found.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    def norm(name: str, width: int) -> None:
        found.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    norm(f"{v}norm", vision)
    norm(f"{t}embeddings.LayerNorm", text)
    for number in range(layers[0]):
        b = f"{v}blocks.{number}."
        norm(f"{b}norm1", vision), norm(f"{b}norm2", vision)
        linear(f"{b}attn.qkv", vision, 3 * vision), linear(f"{b}attn.proj", vision, vision)
        linear(f"{b}mlp.fc1", vision, 4 * vision), linear(f"{b}mlp.fc2", 4 * vision, vision)
    for number in range(layers[1]):
        b = f"{t}encoder.layer.{number}."
        for kind, width in (("attention", text), ("crossattention", vision)):
            linear(f"{b}{kind}.self.query", text, text)
            linear(f"{b}{kind}.self.key", width, text), linear(f"{b}{kind}.self.value", width, text)
            linear(f"{b}{kind}.output.dense", text, text), norm(f"{b}{kind}.output.LayerNorm", text)
        linear(f"{b}intermediate.dense", text, 4 * text), linear(f"{b}output.dense", 4 * text, text)
        norm(f"{b}output.LayerNorm", text)
    sizes = (text, 1024, 128, 64, 16, 1)
    for number, inputs, outputs in zip((0, 2, 4, 6, 7), sizes, sizes[1:], strict=False):
        linear(f"mlp.layers.{number}", inputs, outputs)
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = tmp_path_factory.mktemp("image_reward")
    tokenizer = bert_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)
    weights = {
        # sharp attention, so that a single token more is seen in the score
        key: torch.randn(shape, generator=generator) * (2.0 if ".query." in key or ".key." in key else 0.15)
        for key, shape in shapes((LAYERS, LAYERS), 128, 64, 16, SIDE // 16, len(tokenizer), 40).items()
    }
    torch.save(weights, folder / "ImageReward.pt")
    return folder, weights, tokenizer


def make(folder, **settings):
    given = {"model": str(folder / "ImageReward.pt"), "tokenizer": str(folder)}
    return make_scorer("image_reward", given | settings)


def expected(weights, tokenizer, image, prompt) -> float:
    ids = tokenizer(prompt)["input_ids"]
    ids = ids if len(ids) <= 35 else ids[:34] + ids[-1:]
    arrays = {key: value.double().numpy() for key, value in weights.items()}
    return image_reward(arrays, centre_square(image, SIDE).astype(np.float64), ids, LAYERS, (128 // 64, 64 // 64))


def test_score_is_that_of_the_published_network(published):
    folder, weights, tokenizer = published
    images = pictures()
    answers = make(folder)(images, None, PROMPTS, None)
    wanted = [expected(weights, tokenizer, *pair) for pair in zip(images, PROMPTS, strict=True)]
    assert [a["score"] for a in answers] == pytest.approx(wanted, abs=2e-5)
    assert np.std(wanted) > 0.01
    alone = [make(folder)([i], None, [p], None)[0]["score"] for i, p in zip(images, PROMPTS, strict=True)]
    assert [a["score"] for a in answers] == pytest.approx(alone, abs=2e-5)


def test_pixels_have_the_same_score_and_a_gradient(published):
    check_of_pixels(make(published[0]), near=5e-3)


def test_a_long_prompt_is_cut_after_35_tokens(published):
    folder, weights, tokenizer = published
    (image,) = pictures((40, 40))
    prompt = "abcdefghij" * 9
    assert len(tokenizer(prompt)["input_ids"]) > 35
    (answer,) = make(folder)([image], None, [prompt], None)
    assert answer["score"] == pytest.approx(expected(weights, tokenizer, image, prompt), abs=2e-5)
    other, shorter = make(folder)([image] * 2, None, [prompt[:40] + "zzz", prompt[:32]], None)
    assert answer["score"] == pytest.approx(other["score"], abs=2e-5)
    assert answer["score"] != pytest.approx(shorter["score"], abs=2e-4)  # 33 letters fit, and this one has 32


def test_every_name_of_the_real_model_has_its_place():
    """ViT-L/16 and BERT base with 30524 words, without their weight."""
    real = shapes((24, 12), 1024, 768, 16, 14, 30524, 512)
    vision, text, head = split({key: torch.empty(shape, device="meta") for key, shape in real.items()}, "there")
    seeing, reading = vision_config(vision, "there"), text_config(text, "there")
    assert (seeing.num_attention_heads, seeing.num_hidden_layers, seeing.image_size) == (16, 24, 224)
    assert (reading.num_attention_heads, reading.num_hidden_layers, reading.encoder_hidden_size) == (12, 12, 1024)
    assert (seeing.layer_norm_eps, reading.layer_norm_eps) == (1e-6, 1e-12)
    with torch.device("meta"):
        models = ((BlipVisionModel(seeing), vision_name, vision),
                  (BlipTextModel(reading, add_pooling_layer=False), text_name, text))  # fmt: skip
    for model, named, weights in models:
        check_names({named(name) for name in model.state_dict()}, weights, "there")
        for name, parameter in model.state_dict().items():
            assert weights[named(name)].shape == parameter.shape, name
    assert sorted(head) == sorted(f"mlp.layers.{n}.{kind}" for n in (0, 2, 4, 6, 7) for kind in ("weight", "bias"))


def test_names_that_are_missing_or_unknown_are_told(published, tmp_path):
    folder, weights, _ = published
    for gone, new, told in (
        ("blip.visual_encoder.blocks.1.norm1.bias", None, "it lacks blip.visual_encoder.blocks.1.norm1.bias"),
        ("blip.text_encoder.encoder.layer.0.output.dense.bias", None, "it lacks blip.text_encoder.encoder.layer.0.out"),
        ("mlp.layers.4.weight", None, "it lacks mlp.layers.4.weight"),
        (None, "blip.itm_head.weight", "it has blip.itm_head.weight"),
        (None, "blip.text_encoder.pooler.dense.weight", "it has blip.text_encoder.pooler.dense.weight"),
        (None, "mlp.layers.9.weight", "it has mlp.layers.9.weight"),
    ):
        changed = {key: value for key, value in weights.items() if key != gone}
        torch.save(changed | ({new: torch.ones(2, 2)} if new else {}), tmp_path / "changed.pt")
        with pytest.raises(RunError, match=f"is another model: {told}"):
            make(folder, model=str(tmp_path / "changed.pt"))


def test_the_middle_of_the_image_is_seen():
    wide = pictures((64, 160))[0]
    seen = centre_square(wide, 64) * CLIP_STD[:, None, None] + CLIP_MEAN[:, None, None]
    assert np.allclose(seen, np.array(wide)[:, 48:112].transpose(2, 0, 1) / 255, atol=1e-6)
    assert centre_square(pictures((300, 41))[0], 64).shape == (3, 64, 64)
    for picture in pictures((40, 60), (96, 64)):
        assert np.allclose(centre_square(picture, SIDE), clip_pixels(picture), atol=1e-5)


def test_the_head_is_linear_layers_alone(published):
    _, weights, _ = published
    head = linear_head({key: value for key, value in weights.items() if key.startswith(HEAD)}, "here", HEAD)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(head(x) + head(-x), 2 * head(torch.zeros(5, 64)), atol=1e-3)
