"""GenEval's rules on drawn scenes: a detector that knows the boxes, and a classifier that looks at the drawn pixels."""

import itertools
import json

import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageColor, ImageDraw

from verl_omni.rewards.scorers.geneval import accuracy, accuracy_of, look
from verl_omni.rewards.scorers.geneval.rules import Limits, Seen, keep, overlap, relations
from verl_omni.rewards.scorers.geneval.tasks import COLOURS, RELATIONS, Task, Wanted, read_task

# A prompt of each task, as the published metadata has them.
PROMPTS = {
    "single_object": {"include": [{"class": "bowl", "count": 1}]},
    "two_object": {"include": [{"class": "bowl", "count": 1}, {"class": "skis", "count": 1}]},
    "counting": {"include": [{"class": "cup", "count": 3}], "exclude": [{"class": "cup", "count": 4}]},
    "colors": {"include": [{"class": "cup", "count": 1, "color": "purple"}]},
    "position": {
        "include": [{"class": "laptop", "count": 1}, {"class": "cow", "count": 1, "position": ["right of", 0]}]
    },
    "color_attr": {
        "include": [
            {"class": "handbag", "count": 1, "color": "pink"},
            {"class": "scissors", "count": 1, "color": "black"},
        ]
    },
}
TASKS = {tag: read_task({"tag": tag, **prompt}, None) for tag, prompt in PROMPTS.items()}


class Scene:
    """An image with painted boxes. It is its own detector, and its own classifier of colours."""

    def __init__(self, *objects: tuple, size: int = 400):
        self.image = Image.new("RGB", (size, size), "gray")
        self.seen = []
        for name, box, colour, score in objects:
            ImageDraw.Draw(self.image).rectangle(box, fill=colour)
            self.seen.append(Seen(name, score, box))

    def detect(self, image, names):
        assert image is self.image
        return [one for one in self.seen if one.name in names]

    def colours_of(self, image, boxes, name):
        middles = [image.getpixel(((left + right) // 2, (top + bottom) // 2)) for left, top, right, bottom in boxes]
        by_pixel = {ImageColor.getrgb(colour): colour for colour in COLOURS}
        return [by_pixel[pixel] for pixel in middles]

    def judged(self, task: Task, limits: Limits | None = None):
        return look(self.image, task, self.detect, self.colours_of, limits or Limits())


def at(x: int, y: int, size: int = 20) -> tuple:
    """A box with its centre there."""
    return (x - size // 2, y - size // 2, x + size // 2, y + size // 2)


def thing(name: str, x: int = 100, y: int = 100, colour: str = "white", score: float = 0.95, size: int = 20) -> tuple:
    return (name, at(x, y, size), colour, score)


def row(name: str, count: int, **how) -> list[tuple]:
    return [thing(name, 30 + 40 * i, **how) for i in range(count)]


LAPTOP = thing("laptop", 200, 200)
# task, what is in the scene, words of the reason (none: right)
CASES = {
    "single: there": ("single_object", [thing("bowl")], None),
    "single: several are right too": ("single_object", row("bowl", 3), None),
    "single: another": ("single_object", [thing("cup")], "expected bowl>=1, found 0"),
    "single: at the threshold": ("single_object", [thing("bowl", score=0.3)], "found 0"),
    "single: just above it": ("single_object", [thing("bowl", score=0.3001)], None),
    "two: both": ("two_object", [thing("bowl"), thing("skis", 200)], None),
    "two: one": ("two_object", [thing("bowl"), thing("bowl", 200)], "expected skis>=1, found 0"),
    "two: none": ("two_object", [], "expected bowl>=1, found 0; expected skis>=1, found 0"),
    "counting: three": ("counting", row("cup", 3), None),
    "counting: two": ("counting", row("cup", 2), "expected cup>=3, found 2"),
    "counting: four": ("counting", row("cup", 4), "expected cup<4, found 4"),
    "counting: a fourth at the threshold": ("counting", [*row("cup", 3), thing("cup", 300, score=0.9)], None),
    "counting: a fourth just above": ("counting", [*row("cup", 3), thing("cup", 300, score=0.901)], "found 4"),
    "counting: three unsure ones": ("counting", row("cup", 3, score=0.6), "expected cup>=3, found 0"),
    "colors: right": ("colors", [thing("cup", colour="purple")], None),
    "colors: wrong": ("colors", [thing("cup", colour="red")], "expected purple cup>=1, found red"),
    "colors: no cup": ("colors", [thing("bowl", colour="purple")], "expected cup>=1, found 0"),
    "colors: only the surest counts": (
        "colors",
        [thing("cup", colour="purple", score=0.8), thing("cup", 300, colour="red", score=0.9)],
        "found red",
    ),
    "colors: an unsure red one does not matter": (
        "colors",
        [thing("cup", colour="purple", score=0.9), thing("cup", 300, colour="red", score=0.8)],
        None,
    ),
    "position: right of": ("position", [LAPTOP, thing("cow", 300, 200)], None),
    "position: left of": (
        "position",
        [LAPTOP, thing("cow", 100, 200)],
        "expected cow right of laptop, found it left of",
    ),
    "position: above": ("position", [LAPTOP, thing("cow", 200, 100)], "found it above"),
    "position: right of and above": ("position", [LAPTOP, thing("cow", 300, 100)], None),
    "position: one on the other": ("position", [LAPTOP, thing("cow", 200, 200)], "in no clear direction"),
    "position: no cow": ("position", [LAPTOP], "expected cow>=1, found 0"),
    "position: no laptop": ("position", [thing("cow")], "found 0; no target for cow to be right of"),
    "color_attr: right": (
        "color_attr",
        [thing("handbag", colour="pink"), thing("scissors", 300, colour="black")],
        None,
    ),
    "color_attr: swapped": (
        "color_attr",
        [thing("handbag", colour="black"), thing("scissors", 300, colour="pink")],
        "expected pink handbag>=1, found black; expected black scissors>=1, found pink",
    ),
    "color_attr: one of them": (
        "color_attr",
        [thing("handbag", colour="pink"), thing("scissors", 300, colour="red")],
        "expected black scissors>=1, found red",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_right_or_wrong(case):
    tag, objects, reason = CASES[case]
    for order in (objects, objects[::-1]):  # the order in which a detector reports does not matter
        verdict = Scene(*order).judged(TASKS[tag])
        assert verdict.correct == (reason is None), verdict
        assert (reason or "") in verdict.reason and bool(verdict.reason) == (reason is not None)


def test_of_several_that_are_asked_for_each_has_to_have_the_colour_and_the_place():
    task = Task("position", (Wanted("cat", 2), Wanted("dog", 2, "red", "below", 0)))
    cats = [thing("cat", 100, 100), thing("cat", 300, 100)]
    dogs = [thing("dog", 100, 200, "red"), thing("dog", 300, 200, "red")]
    assert not Scene(*cats, *dogs).judged(task).correct  # 100, 200 is below 100, 100, but hardly below 300, 100
    near = [thing("cat", 190, 100), thing("cat", 210, 100)]
    assert Scene(*near, *dogs).judged(task).correct
    blue = [dogs[0], thing("dog", 300, 200, "blue", score=0.9)]
    assert Scene(*near, *blue).judged(task).reason == "expected red dog>=2, found red and blue"


# ---- which reports count -------------------------------------------------------------------------------


def cups(*boxes, scores=None) -> list[Seen]:
    return [
        Seen("cup", score, box) for score, box in zip(scores or np.linspace(0.9, 0.5, len(boxes)), boxes, strict=True)
    ]


def test_overlap_is_that_of_pixels():
    """Counted on a grid: the last pixels belong to a box."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        boxes = []
        for _ in range(2):
            (left, right), (top, bottom) = np.sort(rng.integers(0, 12, 2)), np.sort(rng.integers(0, 12, 2))
            boxes.append((left, top, right, bottom))
        masks = [np.zeros((12, 12), bool) for _ in boxes]
        for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
            mask[top : bottom + 1, left : right + 1] = True
        assert overlap(*boxes) == pytest.approx((masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum())


def test_the_surest_of_boxes_over_each_other_counts():
    """Half of a box of 10 x 10 overlaps it by exactly 1/2; boxes of other classes do not matter."""
    whole, half, third, far = (0, 0, 9, 9), (0, 0, 9, 4), (0, 0, 9, 2), (50, 50, 59, 59)
    seen = cups(whole, half, third, far) + [Seen("bowl", 0.95, whole)]

    def kept(most: float) -> list:
        return [one.box for one in keep(seen, "colors", Limits(max_overlap=most))["cup"]]

    assert kept(1.0) == [whole, half, third, far]
    assert kept(0.51) == [whole, half, far]  # a third is 3/5 of a half
    assert kept(0.5) == [whole, third, far]  # the half is gone, and overlaps nothing any more
    assert kept(0.3) == [whole, far]
    assert [one.name for one in keep(seen, "colors", Limits(max_overlap=0.3))["bowl"]] == ["bowl"]


def test_the_same_box_twice_counts_twice_unless_told_otherwise():
    twice = cups((0, 0, 9, 9), (0, 0, 9, 9))
    assert len(keep(twice, "counting", Limits(counting_threshold=0.3))["cup"]) == 2
    assert len(keep(twice, "counting", Limits(counting_threshold=0.3, max_overlap=0.99))["cup"]) == 1


def test_at_most_sixteen_count_the_surest_first():
    boxes = [at(20 * i, 20) for i in range(20)]
    seen = cups(*boxes, scores=[0.31 + i / 100 for i in range(20)])
    assert [one.box for one in keep(seen, "colors", Limits())["cup"]] == boxes[:3:-1]
    assert len(keep(seen, "colors", Limits(max_objects=2))["cup"]) == 2


# ---- positions -----------------------------------------------------------------------------------------


def by_the_papers_formula(a, b, margin=0.1) -> set[str]:
    a, b = np.float64(a), np.float64(b)
    centres, sizes = [(box[:2] + box[2:]) / 2 for box in (a, b)], [box[2:] - box[:2] for box in (a, b)]
    offset = centres[0] - centres[1]
    apart = np.sign(offset) * np.maximum(np.abs(offset) - margin * (sizes[0] + sizes[1]), 0)
    if (np.abs(apart) < 1e-3).all():
        return set()
    x, y = apart / np.sqrt((offset**2).sum())
    return {n for n, holds in zip(RELATIONS, (x < -0.5, x > 0.5, y < -0.5, y > 0.5), strict=True) if holds}


def test_positions_follow_the_papers_formula():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(500):
        corner, size = rng.uniform(0, 300, (2, 2)), rng.uniform(5, 200, (2, 2))
        a, b = np.concatenate([corner, corner + size], 1).tolist()
        found.append(relations(a, b))
        assert found[-1] == by_the_papers_formula(a, b)
    assert {len(f) for f in found} == {0, 1, 2} and set().union(*found) == set(RELATIONS)


# Boxes of 10 x 10: the margin is 2 along each axis.
BORDERS = [
    ((4, 0), set()),  # (4 - 2) / 4 is not more than a half
    ((4.01, 0), {"right of"}),
    ((-4.01, 0), {"left of"}),
    ((0, -5), {"above"}),
    ((0, 5), {"below"}),
    ((2, 2), set()),  # all of it is margin
    ((30, 40), {"right of", "below"}),  # 28 / 50 and 38 / 50
    ((20, 40), {"below"}),  # 18 / 44.7 and 38 / 44.7
    ((0, 0), set()),
]


@pytest.mark.parametrize(("offset", "expected"), BORDERS)
def test_borders_of_positions(offset, expected):
    b = (100.0, 100.0, 110.0, 110.0)
    a = tuple(value + shift for value, shift in zip(b, offset * 2, strict=True))
    assert relations(a, b) == expected
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    assert relations(b, a) == {opposite[name] for name in expected}


# ---- the graded score ----------------------------------------------------------------------------------

PINK, BLACK = thing("handbag", colour="pink"), thing("scissors", 300, colour="black")
GRADED = [
    ("single_object", [thing("bowl")], 1),
    ("single_object", [], 0),
    ("single_object", row("bowl", 2), 0),
    ("single_object", row("bowl", 3), -1),  # 1 - |3 - 1| / 1
    ("two_object", [thing("bowl")], 1 / 2),
    ("counting", row("cup", 3), 1),
    ("counting", row("cup", 2), 2 / 3),
    ("counting", row("cup", 4), 2 / 3),
    ("colors", [thing("cup", colour="purple")], 1),
    ("colors", [thing("cup", colour="red")], 1 / 2),
    ("colors", row("cup", 2, colour="purple"), 0),  # neither the number nor, for that reason, the colour
    ("color_attr", [PINK, BLACK], 1),
    ("color_attr", [PINK], 1 / 2),
    ("color_attr", [PINK, thing("scissors", 300, colour="red")], 3 / 4),
    ("position", [LAPTOP, thing("cow", 300, 200)], 1),
    ("position", [LAPTOP, thing("cow", 100, 200)], 2 / 3),
    ("position", [LAPTOP], 1 / 3),
    ("position", [thing("cow", 300, 200)], 1 / 3),
    ("position", [LAPTOP, thing("laptop", 50, 50), thing("cow", 300, 200)], (0 + 1 + 0) / 3),
]


@pytest.mark.parametrize(("tag", "objects", "expected"), GRADED)
def test_graded(tag, objects, expected):
    assert Scene(*objects).judged(TASKS[tag]).graded == pytest.approx(expected)


def test_half_of_the_colours():
    task = Task("color_attr", (Wanted("cat", 2, "red"),))
    assert Scene(thing("cat", colour="red"), thing("cat", 200, colour="blue")).judged(task).graded == 0.75


# ---- metadata ------------------------------------------------------------------------------------------


def test_a_task_comes_in_extra_info_or_as_json():
    for tag, prompt in PROMPTS.items():
        told = {"tag": tag, **prompt, "prompt": "a photo"}
        assert read_task({"index": 3, "split": "test"}, json.dumps(told)) == read_task(told, None) == TASKS[tag]
    assert TASKS["position"].include[1] == Wanted("cow", 1, None, "right of", 0)
    assert TASKS["counting"].exclude == (Wanted("cup", 4),)
    assert TASKS["counting"].names() == ["cup"] and TASKS["two_object"].names() == ["bowl", "skis"]


def test_a_task_survives_parquet(tmp_path):
    """There, entries that a row does not have are null, and lists become arrays. Positions have to be JSON."""
    rows = [{"extra_info": {"tag": tag, **prompt}} for tag, prompt in PROMPTS.items() if tag != "position"]
    rows += [{"extra_info": {"index": 1}, "ground_truth": json.dumps({"tag": "position", **PROMPTS["position"]})}]
    pd.DataFrame(rows).to_parquet(tmp_path / "test.parquet")
    read = pd.read_parquet(tmp_path / "test.parquet").to_dict("records")
    tasks = [read_task(row["extra_info"], row["ground_truth"]) for row in read]
    assert {task.tag: task for task in tasks} == TASKS
    with pytest.raises(Exception, match="(?i)conver|expected"):
        pd.DataFrame([{"extra_info": PROMPTS["position"]}]).to_parquet(tmp_path / "position.parquet")


BAD = [
    (None, "407", "needs the metadata of a prompt (tag, include, ...) in extra_info, or as JSON in"),
    ({}, None, "reward_model.ground_truth, and that is None"),
    ({}, "[1]", "and that is '[1]'"),
    (
        {"include": [{"class": "cup", "count": 1}], "tag": "color"},
        None,
        'tag of a GenEval prompt "color": did you mean',
    ),
    ({"tag": "colors", "include": []}, None, "includes nothing"),
    ({"tag": "colors", "include": [{"class": "cup"}]}, None, 'needs a "class" and a "count"'),
    ({"tag": "colors", "include": [{"class": "cup", "count": 1.5}]}, None, "count"),
    ({"tag": "colors", "include": [{"class": "cup", "count": 1, "color": "gray"}]}, None, 'GenEval requirement "gray"'),
    (
        {"tag": "position", "include": [{"class": "cup", "count": 1, "position": ["left of", 0]}]},
        None,
        "does not come before it",
    ),
    (
        {"tag": "position", "include": [{"class": "cup", "count": 1, "position": ["under", 0]}]},
        None,
        'position of a GenEval requirement "under"',
    ),
]


@pytest.mark.parametrize(("info", "truth", "said"), BAD)
def test_metadata_that_cannot_be_used_gets_one_line(info, truth, said):
    with pytest.raises(ValueError) as error:
        read_task(info, truth)
    assert said in str(error.value) and "\n" not in str(error.value)


# ---- accuracy ------------------------------------------------------------------------------------------

TOLD = [("colors", 1), ("colors", 0), ("colors", 1), ("colors", 1), ("counting", 0), ("two_object", 1)]


def test_accuracy_is_the_mean_over_tasks(tmp_path):
    """3/4, 0 and 1: 7/12 over tasks, where it is 4/6 over images."""
    rows = [{"index": i, "reward_extra_info": {"tag": t, "correct": float(c)}} for i, (t, c) in enumerate(TOLD)]
    rows.append({"index": 9, "reward_extra_info": {"ocr_text": "407"}})
    expected = {"two_object": 1.0, "counting": 0.0, "colors": 0.75, "overall": 7 / 12}
    assert accuracy(rows) == pytest.approx(expected) and list(accuracy(rows)) == list(expected)
    assert accuracy(row["reward_extra_info"] for row in rows) == accuracy(rows)
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert accuracy_of(tmp_path) == accuracy(rows)


def test_without_images_of_geneval_there_is_no_accuracy():
    with pytest.raises(ValueError, match="none of the rows was scored by the geneval reward"):
        accuracy([{"reward_extra_info": {"exact": 1.0}}])


def test_all_tasks_are_in_the_paper_s_order():
    rows = [{"tag": tag, "correct": 1.0} for tag in itertools.chain(reversed(PROMPTS), PROMPTS)]
    order = ["single_object", "two_object", "counting", "colors", "position", "color_attr", "overall"]
    assert list(accuracy(rows)) == order
