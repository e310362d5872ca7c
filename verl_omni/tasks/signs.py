"""`signs`: a scene with one to three signs, each with a word of three to eight letters, which the `ocr` reward reads.

Nobody cuts the signs out: the OCR has to find them in the whole picture. The words are those of the task `words`.
"""

import functools
import random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from verl_omni.rewards.images import to_rgb_array
from verl_omni.tasks.words import font_of, split_words

NAME = "signs"
HEIGHT, WIDTH = 128, 128
NUM_INFERENCE_STEPS = 8
PICTURES = 60_000
COUNTED, SECOND = "score", "daylight"  # of what the reward tells: what is reported, what is watched
GENERATOR = {"layers": 8, "heads": 12, "batch": 256, "score_pictures": 96}  # 43 million parameters
ROWS = {"train": 4000, "val": 100}
MOST = 3
GROUNDS = {"wall": (176, 120, 96), "meadow": (120, 160, 88), "sky": (140, 180, 220), "road": (130, 130, 136)}
PLACES = {1: [64], 2: [40, 88], 3: [24, 64, 104]}  # of the signs' middles, from the top


def prompt_of(words: tuple[str, ...], ground: str) -> str:
    named = " and ".join(f'"{word}"' for word in words)
    return f"a {ground} with {len(words)} sign{'s' * (len(words) > 1)} that read{'s' * (len(words) == 1)} {named}"


def known_texts() -> list[str]:
    """What a prompt is made of is tokens, and each letter of a sign is."""
    return [prompt_of(("",) * count, ground) for count in PLACES for ground in GROUNDS]


@functools.cache
def asked_for(split: str) -> list[tuple[tuple[str, ...], str]]:
    """(words, ground) of each row; none of the words is in the other split."""
    chooser, words = random.Random(split), split_words()[split == "val"]
    return [
        (tuple(chooser.sample(words, 1 + index % MOST)), chooser.choice(list(GROUNDS))) for index in range(ROWS[split])
    ]


def rows(split: str) -> list[dict[str, Any]]:
    """The rows of a data file."""
    return [
        {
            "data_source": "signs",
            "prompt": prompt_of(words, ground),
            "reward_model": {"style": "rule", "ground_truth": " ".join(words)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (words, ground) in enumerate(asked_for(split))
    ]


def draw_scene(words: tuple[str, ...], ground: str, rng: np.random.Generator) -> np.ndarray:
    """Light signs with dark words before the ground, uint8 (HEIGHT, WIDTH, 3)."""
    colour = tuple(int(part) for part in np.array(GROUNDS[ground]) + rng.integers(-16, 17))
    scene = Image.new("RGB", (WIDTH, HEIGHT), colour)
    pen = ImageDraw.Draw(scene)
    for word, middle in zip(words, PLACES[len(words)], strict=True):
        font = font_of(int(rng.integers(17, 20)))
        half, y = pen.textlength(word, font) / 2 + 6, middle + int(rng.integers(-3, 4))
        x = WIDTH / 2 + rng.uniform(-1, 1) * max(0.0, WIDTH / 2 - half - 2)
        paper = int(rng.integers(225, 256))
        pen.rectangle((x - half, y - 14, x + half, y + 14), fill=(paper,) * 3, outline=(60, 60, 60))
        pen.text((x, y), word, fill=(int(rng.integers(0, 50)),) * 3, font=font, anchor="mm")
    noisy = np.asarray(scene, np.float32) + rng.normal(0, 4, (HEIGHT, WIDTH, 3))
    return noisy.clip(0, 255).round().astype(np.uint8)


def training_pictures(count: int, seed: int, device: torch.device | str) -> tuple[torch.Tensor, list[tuple[str, str]]]:
    """Scenes, uint8, and of each its prompt and words, none of them held out."""
    rng, known = np.random.default_rng(seed), asked_for("train")
    asked = [known[i] for i in rng.integers(len(known), size=count)]
    scenes = torch.from_numpy(np.stack([draw_scene(words, ground, rng) for words, ground in asked]))
    return scenes.permute(0, 3, 1, 2).to(device), [(prompt_of(*one), " ".join(one[0])) for one in asked]


def daylight(picture: np.ndarray) -> float:
    """How light a picture is, 0 to 1: what reading words has nothing to do with."""
    return float(picture.astype(np.float32).mean() / 255)


def score(images: list, ground_truths: list[str]) -> list[dict[str, Any]]:
    """The reward `ocr` of each whole scene. `daylight` is a second one, which is shown and not trained on."""
    from verl_omni.rewards.scorers.ocr import compute_score_ocr

    answers = compute_score_ocr(images, ground_truths)
    return [answer | {"daylight": daylight(to_rgb_array(image))} for answer, image in zip(answers, images, strict=True)]


def compute_score(solution_images: list, ground_truths: list[str]) -> list[dict[str, Any]]:
    """`score` under the names that a run calls it with."""
    return score(solution_images, ground_truths)
