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
from verl_omni.rewards.scoring import Scoring, as_reward_function
from verl_omni.utils.json_files import read_lines
from verl_omni.utils.responses import read_response

FILES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4", ".wav")
GRID = "grid.png"  # that `verl-omni sample` writes beside its images


@dataclass
class Sample:
    """An image on disk, or a sound, with what a reward is told of it, and then what the rewards said."""

    file: Path
    prompt: str = ""
    ground_truth: str | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    answers: dict[str, dict[str, Any] | RewardError] = field(default_factory=dict)
    response: Any = None  # where it is at hand, and the file has less

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
                    raise ValueError(f'the reward "{label}" reads the {what}, and {sample.file} has none: {remedy}')

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
            own = {GRID} if (place / "samples.jsonl").is_file() else set()
            inside = sorted(p for p in place.iterdir() if p.suffix.lower() in FILES and p.name not in own)
            if not inside:
                raise FileNotFoundError(f"{place} holds no image, video or sound ({', '.join(FILES)})")
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            raise FileNotFoundError(f"{place} is not there")
    return found


def read_samples(path: str | Path) -> list[Sample]:
    """Of a JSONL file with `image` or `file`, `prompt`, `ground_truth`, `extra_info`, as runs write it."""
    path, samples = Path(path), []
    for where, row in read_lines(path):
        name = row.get("image") or row.get("file") or row.get("file_name")
        if not isinstance(name, str):
            raise ValueError(f"{where}: there is no `image`: expected the name of a file")
        file = path.parent / name
        if not os.path.isfile(file):  # Path.is_file raises where a name is too long
            raise FileNotFoundError(f"{where}: {str(file)[:200]} is not there")
        for key, kind in (("prompt", str), ("reward_model", dict), ("extra_info", dict)):
            if not isinstance(row.get(key), kind | None):
                expected = "a text" if kind is str else "an object"
                raise ValueError(f"{where}: {key} is {row[key]!r:.60}: expected {expected}")
        truth = row.get("ground_truth") or (row.get("reward_model") or {}).get("ground_truth")
        samples.append(Sample(file, row.get("prompt") or "", truth, row.get("extra_info") or {}))
    if not samples:
        raise ValueError(f"{path} is empty")
    return samples


def score(
    samples: Sequence[Sample], functions: Mapping[str, RewardFunction], batch_size: int = 8, progress: Any = None
) -> None:
    """Fill in `answers`. A failure is an answer too; nothing is tried twice."""

    async def one(scoring: Scoring, sample: Sample, response: Any, label: str, place: tuple[int, int]) -> None:
        seen = {
            "data_source": label,
            "response": response,
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
                        opened.append((sample, opened_response(sample)))
                    except RewardError as error:
                        sample.answers[label] = error
                places = [(i, len(opened)) for i in range(len(opened))]
                await asyncio.gather(
                    *(one(scoring, *pair, label, place) for pair, place in zip(opened, places, strict=True))
                )
                if progress is not None:
                    progress.update(len(samples[start : start + batch_size]))

    asyncio.run(run())


def opened_response(sample: Sample) -> Any:
    if sample.response is not None:
        return sample.response
    try:
        return read_response(sample.file)
    except (OSError, ValueError, ImportError) as error:
        raise RewardError(str(error)) from error


def as_functions(choices: Mapping[str, Choice]) -> dict[str, RewardFunction]:
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
                    "chosen": str(best.file.resolve()),
                    "rejected": str(worst.file.resolve()),
                    "chosen_score": best.score(reward),
                    "rejected_score": worst.score(reward),
                }
            )
    return pairs
