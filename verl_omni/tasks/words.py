"""`words`: signs with a word of three to eight letters, which the `ocr_line` reward reads.

The words are made of syllables, so that there are thousands, and most of them nobody has ever read.
"""

import functools
import random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from verl_omni.rewards.images import to_rgb_array

NAME = "words"
HEIGHT, WIDTH = 32, 96
NUM_INFERENCE_STEPS = 8
PICTURES = 40_000  # to train a generator with: each takes a millisecond to draw
GENERATOR = {"layers": 8, "heads": 9, "score_every": 250}  # 24 million parameters
COUNTED, SECOND = "score", "tidy"  # of what the reward tells: what is reported, what is watched
WORDS, HELD_OUT = 4000, 200
VAL_ROWS = 100
CONSONANTS, VOWELS = "BCDFGHJKLMNPRSTVWZ", "AEIOU"


@functools.cache
def split_words() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(to train with, held out of everything but validation), always the same."""
    chooser, words = random.Random(0), {}
    while len(words) < WORDS:
        first, length = chooser.randint(0, 1), chooser.randint(3, 8)  # whether it begins with a vowel
        words["".join(chooser.choice((CONSONANTS, VOWELS)[(i + first) % 2]) for i in range(length))] = None
    return tuple(words)[HELD_OUT:], tuple(words)[:HELD_OUT]


def prompt_of(word: str) -> str:
    return f'a sign that reads "{word}"'


def known_texts() -> list[str]:
    """The words of a prompt are tokens, and each letter of the sign is."""
    return [prompt_of("")]


def rows(split: str) -> list[dict[str, Any]]:
    """The rows of a data file."""
    train, held_out = split_words()
    words = train if split == "train" else held_out[:VAL_ROWS]
    return [
        {
            "data_source": "words",
            "prompt": prompt_of(word),
            "reward_model": {"style": "rule", "ground_truth": word},
            "extra_info": {"split": split, "index": index},
        }
        for index, word in enumerate(words)
    ]


def draw_sign(word: str, rng: np.random.Generator) -> np.ndarray:
    """A dark word on a light sign, uint8 (HEIGHT, WIDTH, 3)."""
    sign = Image.new("L", (WIDTH, HEIGHT), int(rng.integers(200, 256)))
    font, pen = font_of(int(rng.integers(14, 19))), ImageDraw.Draw(sign)
    spare = max(0.0, (WIDTH - pen.textlength(word, font)) / 2 - 3)
    centre = WIDTH / 2 + rng.uniform(-spare, spare), HEIGHT / 2 + rng.uniform(-4, 4)
    pen.text(centre, word, fill=int(rng.integers(0, 71)), font=font, anchor="mm")
    noisy = np.asarray(sign, np.float32)[:, :, None] + rng.normal(0, 6, (HEIGHT, WIDTH, 3))
    return noisy.clip(0, 255).round().astype(np.uint8)


@functools.cache
def font_of(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size)


def training_pictures(count: int, seed: int, device: torch.device | str) -> tuple[torch.Tensor, list[tuple[str, str]]]:
    """Signs, uint8, and of each its prompt and word, none of them held out."""
    rng, (train, _) = np.random.default_rng(seed), split_words()
    words = [train[i] for i in rng.integers(len(train), size=count)]
    signs = torch.from_numpy(np.stack([draw_sign(word, rng) for word in words]))
    return signs.permute(0, 3, 1, 2).to(device), [(prompt_of(word), word) for word in words]


def tidy(picture: np.ndarray) -> float:
    """How near the pixels are to paper or to ink: 1 where all of them are one or the other."""
    grey = picture.astype(np.float32).mean(-1)
    away = np.minimum(abs(grey - 35) - 35, abs(grey - 227) - 28).clip(0)
    return float(1 - away.mean() / 64)


def score(images: list, ground_truths: list[str]) -> list[dict[str, Any]]:
    """The OCR's reward of each image. `tidy` is a second one, which is shown and not trained on."""
    from verl_omni.rewards.scorers.ocr import compute_score_ocr_line

    answers = compute_score_ocr_line(images, ground_truths)
    return [answer | {"tidy": tidy(to_rgb_array(image))} for answer, image in zip(answers, images, strict=True)]


def compute_score(solution_images: list, ground_truths: list[str]) -> list[dict[str, Any]]:
    """`score` under the names that a run calls it with."""
    return score(solution_images, ground_truths)
