"""HPS v2 from a checkpoint with its published names, against the network written out in numpy."""

import numpy as np
import pytest
import torch
from PIL import Image
from published_networks import hpsv2
from tiny_scorers import CLIP_MEAN, CLIP_STD, PROMPTS, check_of_pixels, clip_tokenizer, pictures

from verl_omni.rewards import make_scorer
from verl_omni.rewards.published_weights import build_model, check_names
from verl_omni.rewards.scorers.hpsv2 import config_of, letterbox, open_clip_name, part_of
from verl_omni.utils.errors import RunError

LAYERS, SIDE = 2, 28


def shapes(layers: tuple[int, int], vision: int, text: int, projection: int, patch: int, grid: int, words: int) -> dict:
    """Names and shapes of open_clip's state dict for a ViT, as in HPS_v2.1_compressed.pt."""
    found = {
        "positional_embedding": (77, text),
        "text_projection": (text, projection),
        "logit_scale": (),
        "token_embedding.weight": (words, text),
        "visual.class_embedding": (vision,),
        "visual.positional_embedding": (grid**2 + 1, vision),
        "visual.proj": (vision, projection),
        "visual.conv1.weight": (vision, 3, patch, patch),
    }
    for name, width in (("visual.ln_pre", vision), ("visual.ln_post", vision), ("ln_final", text)):
        found |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    for tower, depth, width in (("visual.", layers[0], vision), ("", layers[1], text)):
        for number in range(depth):
            block = f"{tower}transformer.resblocks.{number}."
            found |= {
                f"{block}attn.in_proj_weight": (3 * width, width),
                f"{block}attn.in_proj_bias": (3 * width,),
                f"{block}attn.out_proj.weight": (width, width),
                f"{block}attn.out_proj.bias": (width,),
                f"{block}mlp.c_fc.weight": (4 * width, width),
                f"{block}mlp.c_fc.bias": (4 * width,),
                f"{block}mlp.c_proj.weight": (width, 4 * width),
                f"{block}mlp.c_proj.bias": (width,),
            }
            found |= {f"{block}ln_{n}.{kind}": (width,) for n in (1, 2) for kind in ("weight", "bias")}
    return found


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folder with tokenizer and checkpoint, the weights, and the tokenizer."""
    folder = tmp_path_factory.mktemp("hpsv2")
    tokenizer = clip_tokenizer(folder)
    generator = torch.Generator().manual_seed(0)
    weights = {
        key: torch.randn(shape, generator=generator) * 0.2
        for key, shape in shapes((LAYERS, LAYERS), 160, 128, 24, 14, SIDE // 14, len(tokenizer)).items()
    }
    torch.save({"state_dict": weights}, folder / "HPS_v2.1_compressed.pt")
    return folder, weights, tokenizer


def make(folder, **settings):
    given = {"model": str(folder / "HPS_v2.1_compressed.pt"), "tokenizer": str(folder)}
    return make_scorer("hpsv2", given | settings)


def expected(weights, tokenizer, image, prompt) -> float:
    pixels = (letterbox(image, SIDE).double().numpy() - CLIP_MEAN[:, None, None]) / CLIP_STD[:, None, None]
    ids = tokenizer(prompt)["input_ids"]
    arrays = {key: value.double().numpy() for key, value in weights.items()}
    return hpsv2(arrays, pixels, ids[:76] + ids[-1:] if len(ids) > 77 else ids, LAYERS, 160 // 80, 128 // 64)


def test_score_is_that_of_the_published_network(published):
    folder, weights, tokenizer = published
    images = pictures()
    answers = make(folder)(images, None, PROMPTS, None)
    wanted = [expected(weights, tokenizer, *pair) for pair in zip(images, PROMPTS, strict=True)]
    assert [a["score"] for a in answers] == pytest.approx(wanted, abs=1e-5)
    alone = [make(folder)([i], None, [p], None)[0]["score"] for i, p in zip(images, PROMPTS, strict=True)]
    assert [a["score"] for a in answers] == pytest.approx(alone, abs=1e-5)


def test_pixels_have_the_same_score_and_a_gradient(published):
    """Pictures are resized in torch too, so that both agree to rounding."""
    check_of_pixels(make(published[0]), near=1e-5, side=SIDE)


def test_a_long_prompt_is_cut_after_77_tokens(published):
    folder, weights, tokenizer = published
    (image,) = pictures((30, 30))
    prompt = "a fox and " * 30
    (answer,) = make(folder)([image], None, [prompt], None)
    assert answer["score"] == pytest.approx(expected(weights, tokenizer, image, prompt), abs=1e-5)


def test_half_precision_weights_become_what_was_asked_for(published, tmp_path):
    folder, weights, _ = published
    half = {key: value.half() for key, value in weights.items()}
    torch.save({"state_dict": half}, tmp_path / "half.pt")
    scorer = make(folder, model=str(tmp_path / "half.pt"))
    assert {p.dtype for p in scorer.model.parameters()} == {torch.float32}


def test_every_name_of_the_real_model_has_its_place():
    """ViT-H-14: 32 and 24 layers, without their weight."""
    real = shapes((32, 24), 1280, 1024, 1024, 14, 16, 49408)
    weights = {key: torch.empty(shape, device="meta") for key, shape in real.items()}
    config = config_of(weights, 49407, "there")
    vision, text = config.vision_config, config.text_config
    assert (vision.num_attention_heads, vision.intermediate_size, vision.image_size) == (16, 5120, 224)
    assert (text.num_attention_heads, text.intermediate_size, text.num_hidden_layers) == (16, 4096, 24)

    from transformers import CLIPModel

    with torch.device("meta"):
        model = CLIPModel(config)
    assert sum(p.numel() for p in model.parameters()) == 986_109_441  # open_clip's own count for ViT-H-14
    check_names({open_clip_name(name) for name in model.state_dict()}, weights, "there")
    for name, parameter in model.state_dict().items():
        assert part_of(name, weights[open_clip_name(name)]).shape == parameter.shape, name


def test_names_that_are_missing_or_unknown_are_told(published):
    from transformers import CLIPModel

    _, weights, tokenizer = published
    config = config_of(weights, tokenizer.eos_token_id, "here")
    for change, told in (
        (lambda w: w.pop("visual.transformer.resblocks.1.ln_2.bias"), "lacks visual.transformer.resblocks.1.ln_2.bias"),
        (lambda w: w.update({"score_head.weight": torch.ones(1)}), "it has score_head.weight"),
        (lambda w: w.update({"ln_final.bias": torch.ones(3)}), "of another shape is ln_final.bias"),
    ):
        changed = dict(weights)
        change(changed)
        with pytest.raises(RunError, match=f"here is another model: .*{told}"):
            build_model(CLIPModel, config, changed, open_clip_name, "here", torch.float32, part_of)


def test_a_file_that_is_something_else_is_refused(published, tmp_path):
    folder, weights, _ = published
    torch.save({"state_dict": weights, "run": print}, tmp_path / "run.pt")
    (tmp_path / "text.pt").write_bytes(b"hello")
    (tmp_path / "text.safetensors").write_bytes(b"hello")
    for name in ("run.pt", "text.pt", "text.safetensors"):
        with pytest.raises(RunError, match=f'{name}" is not a checkpoint of tensors alone') as error:
            make(folder, model=str(tmp_path / name))
        assert "\n" not in str(error.value)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(RunError, match="is not a checkpoint of tensors by name"):
        make(folder, model=str(tmp_path / "list.pt"))
    torch.save({"a": torch.ones(1)}, tmp_path / "other.pt")
    with pytest.raises(RunError, match="is another model: it lacks visual.conv1.weight"):
        make(folder, model=str(tmp_path / "other.pt"))


def test_the_whole_image_is_seen_between_black_bars():
    wide = letterbox(Image.new("RGB", (200, 100), (255, 128, 0)), 40)
    assert wide.shape == (3, 40, 40)
    inside = torch.tensor([1, 128 / 255, 0]).view(3, 1, 1).expand(3, 20, 40)
    assert torch.allclose(wide[:, 10:30], inside, atol=1e-6)
    assert wide[:, :10].abs().max() == wide[:, 30:].abs().max() == 0
    square = pictures((40, 40))[0]
    assert np.allclose(letterbox(square, 40).permute(1, 2, 0), np.array(square) / 255, atol=1e-6)
    smooth = Image.linear_gradient("L").convert("RGB")
    by_pillow = np.array(smooth.resize((40, 40), Image.Resampling.BICUBIC)) / 255
    assert np.allclose(letterbox(smooth, 40).permute(1, 2, 0), by_pillow, atol=1 / 255)
    # Halves of two colours stay where they are, whichever side is the longer one.
    tall = Image.new("RGB", (50, 100), "white")
    tall.paste((0, 0, 0), (0, 50, 50, 100))
    seen = letterbox(tall, 40)[0]
    assert seen[:, 20][5].item() == pytest.approx(1, abs=0.01) and seen[:, 20][35].item() == pytest.approx(0, abs=0.01)
    assert seen[:, :10].abs().max() == 0
