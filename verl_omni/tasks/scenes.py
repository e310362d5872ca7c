"""`scenes`: the six tasks of GenEval (arXiv 2310.11513) in miniature, on drawn shapes.

A prompt asks for shapes, their colours, how many there are and where. The rules are those of the `geneval` reward, and
its detector is exact here: a shape that is drawn well is found, and nothing else. A run is trained on the graded score,
as Flow-GRPO's are; `correct` is what the paper counts.
"""

import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from verl_omni.rewards.images import to_rgb_array
from verl_omni.rewards.scorers.geneval.rules import Limits, Seen, Verdict, judge, keep
from verl_omni.rewards.scorers.geneval.tasks import COLOURS, RELATIONS, TAGS, Task, Wanted, read_task
from verl_omni.tasks.shapes import NAMES, SIZE, Found, draw, find

NAME = "scenes"
HEIGHT = WIDTH = SIZE
NUM_INFERENCE_STEPS = 8
PICTURES = 100_000  # to train a generator with
COUNTED, SECOND = "correct", "nothing_else"  # of what the reward tells: what is reported, what is watched
LIMITS = Limits(threshold=0.65, counting_threshold=0.65)
COUNTS = {2: "two", 3: "three", 4: "four"}
HELD_OUT = {"single_object": 2, "two_object": 6, "counting": 6, "colors": 16, "position": 24, "color_attr": 40}
ATTRIBUTED = 640  # of the thousands of prompts with two colours
TRAIN_ROWS, VAL_ROWS = 128, 20  # of each task
OPPOSITE = {"right of": "left of", "below": "above"}
DIRECTIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}


def article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def plural(name: str) -> str:
    return f"{name}es" if name.endswith("s") else f"{name}s"


def prompt_of(task: Task) -> str:
    """In the words of GenEval's own prompts."""
    things = [f"{one.colour} {one.name}" if one.colour else one.name for one in task.include]
    if task.tag == "counting":
        (wanted,) = task.include
        return f"a photo of {COUNTS[wanted.count]} {plural(wanted.name)}"
    if task.tag == "position":
        return f"a photo of {article(things[1])} {task.include[1].relation} {article(things[0])}"
    return f"a photo of {' and '.join(map(article, things))}"


def all_tasks(tag: str) -> Iterator[Task]:
    """All that can be asked for; of two colours, a part."""
    if tag == "single_object":
        yield from (Task(tag, (Wanted(name, 1),)) for name in NAMES)
    elif tag == "counting":
        for name, count in itertools.product(NAMES, COUNTS):
            yield Task(tag, (Wanted(name, count),), (Wanted(name, count + 1),))
    elif tag == "colors":
        yield from (Task(tag, (Wanted(name, 1, colour),)) for name, colour in itertools.product(NAMES, COLOURS))
    elif tag == "two_object":
        yield from (Task(tag, (Wanted(a, 1), Wanted(b, 1))) for a, b in itertools.permutations(NAMES, 2))
    elif tag == "position":
        for (a, b), relation in itertools.product(itertools.permutations(NAMES, 2), RELATIONS):
            yield Task(tag, (Wanted(a, 1), Wanted(b, 1, relation=relation, target=0)))
    else:
        pairs = itertools.product(itertools.permutations(NAMES, 2), itertools.permutations(COLOURS, 2))
        chosen = random.Random(0).sample(list(pairs), ATTRIBUTED)
        yield from (Task(tag, (Wanted(a, 1, red), Wanted(b, 1, blue))) for (a, b), (red, blue) in chosen)


def meaning(task: Task) -> tuple:
    """Equal for two prompts that ask for the same picture in another order of words."""
    things = [(one.name, one.count, one.colour) for one in task.include]
    if task.tag != "position":
        return (task.tag, *sorted(things, key=str))
    relation = task.include[1].relation
    pair = things if relation in OPPOSITE else things[::-1]
    return (task.tag, OPPOSITE.get(relation, relation), *pair)


def split_tasks() -> tuple[dict[str, list[Task]], dict[str, list[Task]]]:
    """(to train with, held out of everything but validation), by tag, always the same; no meaning is in both."""
    train, held_out = {}, {}
    for tag in TAGS:
        tasks = list(all_tasks(tag))
        meanings = list(dict.fromkeys(map(meaning, tasks)))
        random.Random(0).shuffle(meanings)
        chosen = set(meanings[: HELD_OUT[tag]])
        train[tag] = [task for task in tasks if meaning(task) not in chosen]
        held_out[tag] = [task for task in tasks if meaning(task) in chosen]
    return train, held_out


def rows(split: str) -> list[dict[str, Any]]:
    """The rows of a data file: as many of each task, whose prompts are repeated where there are fewer."""
    count = TRAIN_ROWS if split == "train" else VAL_ROWS
    tasks = split_tasks()[split != "train"]
    found = []
    for tag in TAGS:
        shuffled = random.Random(1).sample(tasks[tag], len(tasks[tag]))
        found += itertools.islice(itertools.cycle(shuffled), count)
    return [
        {
            "data_source": "scenes",
            "prompt": prompt_of(task),
            "reward_model": {"style": "rule", "ground_truth": json.dumps(metadata(task))},
            "extra_info": {"split": split, "index": index},
        }
        for index, task in enumerate(found)
    ]


def metadata(task: Task) -> dict[str, Any]:
    """As GenEval's own files have it."""

    def entry(wanted: Wanted) -> dict[str, Any]:
        colour = {"color": wanted.colour} if wanted.colour else {}
        position = {"position": [wanted.relation, wanted.target]} if wanted.relation else {}
        return {"class": wanted.name, "count": wanted.count, **colour, **position}

    exclude = {"exclude": [entry(wanted) for wanted in task.exclude]} if task.exclude else {}
    return {"tag": task.tag, "include": [entry(wanted) for wanted in task.include], **exclude}


def known_texts() -> list[str]:
    """All prompts: each of their words is a token."""
    return [prompt_of(task) for tag in TAGS for task in all_tasks(tag)]


def training_pictures(count: int, seed: int, device: torch.device | str) -> tuple[torch.Tensor, list[tuple[str, str]]]:
    """Pictures, uint8, and of each its prompt and ground truth: of each task as many, and none that is held out."""
    train, _ = split_tasks()
    chooser = random.Random(seed)
    tasks = [chooser.choice(train[TAGS[i % len(TAGS)]]) for i in range(count)]
    parts = [tasks[i : i + 5000] for i in range(0, count, 5000)]
    pictures = torch.cat([draw_tasks(part, seed + i, device) for i, part in enumerate(parts)])
    return pictures, [(prompt_of(task), json.dumps(metadata(task))) for task in tasks]


def draw_tasks(tasks: list[Task], seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A picture of each task, uint8 (B, 3, SIZE, SIZE), with nothing in it that was not asked for."""
    rng = np.random.default_rng(seed)
    most = max(sum(wanted.count for wanted in task.include) for task in tasks)
    shapes, colours = np.full((len(tasks), most), -1), rng.integers(len(COLOURS), size=(len(tasks), most))
    directions = np.zeros((len(tasks), 2), int)
    for i, task in enumerate(tasks):
        things = [wanted for wanted in task.include for _ in range(wanted.count)]
        for k, wanted in enumerate(things):
            shapes[i, k] = NAMES.index(wanted.name)
            if wanted.colour:
                colours[i, k] = COLOURS.index(wanted.colour)
            if wanted.relation:
                directions[i] = DIRECTIONS[wanted.relation]
    places = _places((shapes >= 0).sum(1), most, directions, rng)
    generator = torch.Generator(device).manual_seed(seed)
    given = (torch.from_numpy(shapes), torch.from_numpy(colours), torch.from_numpy(places).float())
    return draw(*(one.to(device) for one in given), generator)


def _places(counts: np.ndarray, most: int, directions: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(B, K, 3): x, y and half a side of each object, drawn anew until none touches another and all directions hold."""
    places = np.zeros((len(counts), most, 3))
    open_rows = np.arange(len(counts))
    while len(open_rows):
        few = (counts[open_rows] <= 2)[:, None]
        half = np.where(few, rng.uniform(7, 11, (len(open_rows), most)), rng.uniform(6, 8, (len(open_rows), most)))
        x, y = (rng.uniform(half + 1, SIZE - 2 - half) for _ in range(2))
        there = np.arange(most) < counts[open_rows, None]
        fits = np.ones(len(open_rows), bool)
        for a, b in itertools.combinations(range(most), 2):
            gap = np.maximum(abs(x[:, a] - x[:, b]), abs(y[:, a] - y[:, b])) - half[:, a] - half[:, b]
            fits &= (gap >= 4) | ~there[:, b]
        if most > 1:  # the second object, seen from the first
            offset = np.stack([x[:, 1] - x[:, 0], y[:, 1] - y[:, 0]], 1)
            wanted = directions[open_rows]
            along = (offset * wanted).sum(1)
            across = abs(offset * (1 - abs(wanted))).sum(1)
            fits &= (wanted == 0).all(1) | (along > 2 * across)
        places[open_rows[fits]] = np.stack([x, y, half], 2)[fits]
        open_rows = open_rows[~fits]
    return places


def look(picture: np.ndarray, task: Task) -> tuple[Verdict, list[Found]]:
    """GenEval's verdict on a picture (H, W, 3), and what is in it."""
    found = [one for one in find(picture) if one.score > LIMITS.threshold]
    names = task.names()
    seen = [Seen(one.name, one.score, one.box) for one in found if one.name in names]
    objects = keep(seen, task.tag, LIMITS)
    colour_at = {one.box: one.colour for one in found}
    colours = {name: [colour_at[one.box] for one in things] for name, things in objects.items()}
    return judge(task, objects, colours), found


def nothing_else(task: Task, found: list[Found]) -> bool:
    """Whether a picture has as many objects as were asked for; GenEval does not look at others."""
    return len(found) == sum(wanted.count for wanted in task.include)


def score(images: list, ground_truths: list[str]) -> list[dict[str, Any]]:
    """The reward of each image. `nothing_else` is a second one, which is shown and not trained on."""
    answers = []
    for image, truth in zip(images, ground_truths, strict=True):
        task = read_task(None, truth)
        verdict, found = look(to_rgb_array(image), task)
        answers.append(
            {
                "score": verdict.graded,
                "correct": float(verdict.correct),
                "nothing_else": float(nothing_else(task, found)),
                "tag": task.tag,
                "reason": verdict.reason,
            }
        )
    return answers


def compute_score(solution_images: list, ground_truths: list[str]) -> list[dict[str, Any]]:
    """`score` under the names that a run calls it with."""
    return score(solution_images, ground_truths)
