"""Rewards tried on images that are already there: before a run, or to make pairs of them."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_omni.rewards.choice import Choice, combine, weighted
from verl_omni.rewards.registry import reads
from verl_omni.rewards.reward_function import RewardError, RewardFunction
from verl_omni.rewards.scoring import Scoring
from verl_omni.utils.image_files import frames_in
from verl_omni.utils.json_files import read_lines

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4")


@dataclass
class Sample:
    """An image on disk with what a reward is told of it, and then what the rewards said."""

    image: Path
    prompt: str = ""
    ground_truth: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, dict[str, Any] | RewardError] = field(default_factory=dict)

    def score(self, reward: str) -> float | None:
        """None where the reward failed."""
        answer = self.answers[reward]
        return None if isinstance(answer, RewardError) else answer["score"]


@dataclass
class Rewards:
    """Registered rewards and functions of the user's own, by label; `added_up` as a run adds them, in `score`."""

    choices: Mapping[str, Choice]
    own: Mapping[str, RewardFunction] = field(default_factory=dict)
    added_up: bool = False

    @property
    def labels(self) -> list[str]:
        """The columns of a table: the sum first, by which images are put in order."""
        return [*(["score"] if self.added_up else []), *self.choices, *self.own]

    def check(self, samples: Sequence[Sample], remedy: str) -> None:
        """What they compare an image with is there for each, or one line says which lacks it, and what to do."""
        absent = {"ground_truth": (None,), "prompt": (None, "")}
        for label, choice in self.choices.items():
            for sample, name in ((sample, name) for sample in samples for name in reads(choice.name)):
                if getattr(sample, name) in absent[name]:
                    what = name.replace("_", " ")
                    raise ValueError(f'the reward "{label}" reads the {what}, and {sample.image} has none: {remedy}')

    def score(self, samples: Sequence[Sample], batch_size: int = 8, progress: Any = None) -> None:
        """Fill in `answers`."""
        score(samples, {**as_functions(self.choices), **self.own}, batch_size, progress)
        if not self.added_up:
            return
        chosen = [self.choices[label] for label in weighted(self.choices)]
        for sample in samples:
            answers = [sample.answers[choice.label] for choice in chosen]
            failed = next((answer for answer in answers if isinstance(answer, RewardError)), None)
            sample.answers["score"] = failed or combine(chosen, answers)


def find_images(places: Sequence[str | Path]) -> list[Path]:
    """Files as they come, the images of folders in the order of their names."""
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = sorted(path for path in place.iterdir() if path.suffix.lower() in IMAGES)
            if not inside:
                raise FileNotFoundError(f"{place} holds no image ({', '.join(IMAGES)})")
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            raise FileNotFoundError(f"{place} is not there")
    return found


def read_samples(path: str | Path) -> list[Sample]:
    """Of a JSONL file with `image` (or `file_name`), `prompt`, `ground_truth`, `extra_info`; runs write such."""
    path, samples = Path(path), []
    for where, row in read_lines(path):
        name = row.get("image") or row.get("file_name")
        if row.get("kind") not in (None, "image", "video"):
            raise ValueError(f"{where}: this is a {row['kind']!s:.20}, and only images and videos are scored by hand")
        if not isinstance(name, str):
            raise ValueError(f"{where}: there is no `image`: expected the name of a file")
        image = path.parent / name
        if not os.path.isfile(image):  # Path.is_file raises where a name is too long
            raise FileNotFoundError(f"{where}: {str(image)[:200]} is not there")
        for key, kind in (("prompt", str), ("reward_model", dict), ("extra_info", dict)):
            if not isinstance(row.get(key), kind | None):
                expected = "a text" if kind is str else "an object"
                raise ValueError(f"{where}: {key} is {row[key]!r:.60}: expected {expected}")
        truth = row.get("ground_truth") or (row.get("reward_model") or {}).get("ground_truth")
        samples.append(Sample(image, row.get("prompt") or "", truth, row.get("extra_info") or {}))
    if not samples:
        raise ValueError(f"{path} is empty")
    return samples


def score(
    samples: Sequence[Sample], functions: Mapping[str, RewardFunction], batch_size: int = 8, progress: Any = None
) -> None:
    """Fill in `answers`. A failure is an answer too; nothing is tried twice."""

    async def one(scoring: Scoring, sample: Sample, pixels: Any, label: str, place: tuple[int, int]) -> None:
        seen = {
            "data_source": label,
            "response": pixels,
            "prompt": sample.prompt,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info | {"prompt": sample.prompt},
        }
        try:
            sample.answers[label] = await scoring.score(seen, label, place)
        except RewardError as error:
            sample.answers[label] = error

    async def run() -> None:
        for label, function in functions.items():
            scoring = Scoring(function, batch_size)
            for start in range(0, len(samples), batch_size):
                opened = []
                for sample in samples[start : start + batch_size]:
                    try:
                        opened.append((sample, open_pixels(sample.image)))
                    except RewardError as error:
                        sample.answers[label] = error
                places = [(i, len(opened)) for i in range(len(opened))]
                await asyncio.gather(
                    *(one(scoring, *pair, label, place) for pair, place in zip(opened, places, strict=True))
                )
                if progress is not None:
                    progress.update(len(samples[start : start + batch_size]))

    asyncio.run(run())


def open_pixels(path: Path) -> Any:
    """An image as floats in [0, 1], (3, H, W), an animation or a video as (F, 3, H, W)."""
    import numpy as np
    import torch

    try:
        frames = [np.array(frame) for frame in frames_in(path)]
    except (OSError, ValueError) as error:
        raise RewardError(str(error)) from error
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255
    return pixels if len(frames) > 1 else pixels[0]


def as_functions(choices: Mapping[str, Choice]) -> dict[str, RewardFunction]:
    from verl_omni.rewards.image_manager import as_reward_function

    return {label: as_reward_function(None, choice) for label, choice in choices.items()}


def preference_pairs(samples: Sequence[Sample], reward: str) -> list[dict[str, Any]]:
    """The best and the worst image of each prompt, where they differ: rows that `prepare-pairs` takes."""
    groups: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.score(reward) is not None:
            groups[sample.prompt].append(sample)
    pairs = []
    for prompt, group in groups.items():
        best = max(group, key=lambda sample: sample.score(reward))
        worst = min(group, key=lambda sample: sample.score(reward))
        if best.score(reward) > worst.score(reward):
            pairs.append(
                {
                    "prompt": prompt,
                    "chosen": str(best.image.resolve()),
                    "rejected": str(worst.image.resolve()),
                    "chosen_score": best.score(reward),
                    "rejected_score": worst.score(reward),
                }
            )
    return pairs
