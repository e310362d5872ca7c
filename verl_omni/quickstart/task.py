"""The task of the quickstart: small signs with a three-digit number, and the prompts that ask for them."""

import functools
import random
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

CHECKPOINT = Path(__file__).parent / "model"  # what the quickstart starts from; `checkpoint.py` says how it was made
LANGUAGE_MODEL = Path(__file__).parent / "rewriter"  # of "think, then draw"; `language_model.py` says how
WIDTH, HEIGHT = 32, 16
HELD_OUT = 200
SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def split_numbers() -> tuple[list[str], list[str]]:
    """The numbers 000 to 999 as (800 to train with, 200 held out of everything but validation), always the same."""
    numbers = [f"{n:03d}" for n in range(1000)]
    random.Random(0).shuffle(numbers)
    return numbers[HELD_OUT:], numbers[:HELD_OUT]


def prompt_for(number: str) -> str:
    """The prompt that asks for a sign with this number."""
    return f'a sign that reads "{number}"'


def words_prompt(number: str) -> str:
    """The same wish in words, which a model that only knows digits cannot read."""
    return f'a sign that reads "{in_words(int(number))}"'


def in_words(number: int) -> str:
    """0 to 999: three hundred and five."""
    if number >= 100:
        hundreds, rest = f"{SMALL[number // 100]} hundred", number % 100
        return f"{hundreds} and {in_words(rest)}" if rest else hundreds
    if number < 20:
        return SMALL[number]
    return TENS[number // 10 - 2] + (f" {SMALL[number % 10]}" if number % 10 else "")


def draw_sign(number: str, rng: np.random.Generator) -> np.ndarray:
    """A dark number on a light sign, uint8 (HEIGHT, WIDTH, 3); size, place, shades and noise drawn from ``rng``."""
    sign = Image.new("L", (WIDTH, HEIGHT), int(rng.integers(200, 256)))
    centre = WIDTH / 2 + rng.uniform(-1.5, 1.5), HEIGHT / 2 + rng.uniform(-1, 1)
    font = _font(int(rng.integers(11, 15)))
    ImageDraw.Draw(sign).text(centre, number, fill=int(rng.integers(0, 71)), font=font, anchor="mm")
    noisy = np.asarray(sign, np.float32)[:, :, None] + rng.normal(0, 8, (HEIGHT, WIDTH, 3))
    return noisy.clip(0, 255).round().astype(np.uint8)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size)
