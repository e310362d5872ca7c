"""Folders with tiny random models of the real classes, as rewards load them, and pictures to score."""

import string
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertTokenizer,
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

CLIP_MEAN, CLIP_STD = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
PROMPTS = ["a red fox", "two cats, and a dog in the snow", "Tower 12"]
SIDE = 32  # of what the tiny models see


def pictures(*shapes: tuple[int, int], seed: int = 0) -> list[Image.Image]:
    """Noise over a gradient: no two alike, and the middle is not like the edges."""
    rng = np.random.default_rng(seed)
    found = []
    for height, width in shapes or ((48, 48), (40, 64), (90, 50)):
        slope = np.linspace(0, 150, width)[None, :, None] * rng.random(3)
        found.append(Image.fromarray((slope + rng.integers(0, 100, (height, width, 3))).astype(np.uint8)))
    return found


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Every parameter matters: none is 0 or 1 as modules begin. What was random before does not count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            begins = parameter if parameter.unique().numel() == 1 else 0
            parameter.copy_(begins + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def clip_words() -> list[str]:
    """Letters, within and at the end of words; the end token has the highest number, as in CLIP's own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]


def clip_tokenizer(folder: Path) -> CLIPTokenizer:
    tokenizer = CLIPTokenizer(vocab={word: number for number, word in enumerate(clip_words())}, merges=[])
    tokenizer.save_pretrained(folder)
    return tokenizer


def clip_folder(folder: Path, seed: int = 0, **config) -> CLIPModel:
    tokenizer = clip_tokenizer(folder)
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    settings = {"projection_dim": 16} | config
    model = CLIPModel(
        CLIPConfig(text_config=tower | tokens, vision_config=tower | {"image_size": SIDE, "patch_size": 8}, **settings)
    )
    randomise(model, seed).save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE).save_pretrained(folder)
    return model


def siglip_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Letters and an end token. Like that of SigLIP 2 it tells capitals from small letters, and writes ▁ for a space.

    It has to be like that one: transformers since 5.20 take no other normalisation than its own for SigLIP 2.
    """
    letters = [*string.ascii_letters, *string.digits, ",", "▁"]
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 1)])
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=["input_ids"], **tokens)
    made.save_pretrained(folder)
    return made


def siglip_folder(folder: Path) -> SiglipModel:
    words = len(siglip_tokenizer(folder))
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": words, "max_position_embeddings": 24, "bos_token_id": None, "eos_token_id": 1}
    model = SiglipModel(
        SiglipConfig(text_config=tower | tokens, vision_config=tower | {"image_size": SIDE, "patch_size": 8})
    )
    randomise(model).save_pretrained(folder)
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, resample=2).save_pretrained(folder)
    return model


def bert_tokenizer(folder: Path) -> BertTokenizer:
    """Letters, alone and within words."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789,"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    return tokenizer


def clip_pixels(picture: Image.Image, size: int = SIDE) -> np.ndarray:
    """CLIP's own preparation, written out: shorter side to `size`, middle of the longer one, mean and deviation."""
    scale = size / min(picture.size)
    width, height = (int(side * scale + 1e-9) for side in picture.size)
    resized = np.array(picture.resize((width, height), Image.Resampling.BICUBIC), np.float64)
    top, left = (height - size) // 2, (width - size) // 2
    square = resized[top : top + size, left : left + size] / 255
    return ((square - CLIP_MEAN) / CLIP_STD).transpose(2, 0, 1)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def as_pixels(picture: Image.Image) -> torch.Tensor:
    """1 x 3 x height x width in [0, 1]."""
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255


def check_of_pixels(scorer, near: float, side: int = SIDE) -> None:
    """Scores of pixels are those of the picture, each with its prompt, and have a gradient; the weights have none.

    Of a picture of `side` pixels, as large as what the model sees, nothing is resized, and both agree to rounding. Of
    others PIL rounds to 256 steps of brightness, after rows and after columns, and torch does not
    (test_image_tensors.py): `near` is what that makes of a score with these large random weights.
    """
    for chosen, off in ((pictures((side, side), seed=3), 2e-5), (pictures(), near)):
        for picture in chosen:
            pixels = as_pixels(picture).requires_grad_()
            scores = scorer.of_pixels(pixels.expand(3, -1, -1, -1), PROMPTS)
            wanted = [row["score"] for row in scorer([picture] * 3, None, PROMPTS, None)]
            assert scores.tolist() == pytest.approx(wanted, abs=off) and len(set(wanted)) == 3
            for score in scores:
                (gradient,) = torch.autograd.grad(score, pixels, retain_graph=True)
                assert gradient.isfinite().all() and gradient.any()
    weights = [p for value in vars(scorer).values() if isinstance(value, torch.nn.Module) for p in value.parameters()]
    assert weights and not any(p.requires_grad for p in weights)
    with pytest.raises(ValueError, match="that of image 0 is ''"):
        scorer.of_pixels(pixels, [""])
