"""Does an image show the wanted text? Read it with a real OCR (rapidocr) and compare."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

from verl_omni.config.knob import Range
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.text_reader import Mode, read_text
from verl_omni.utils.suggest import unknown

Matching = Literal["words", "contains"]
Threads = Annotated[int, Range(least=1)]

# A recogniser drops spaces here and there ("EST.1987"), but hardly between two letters. Han and kana need none.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\d+(?:[.,:]\d+)*|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]|_")


def edit_distance(a: str, b: str) -> int:
    """Levenshtein distance: the least number of insertions, deletions and substitutions that make ``b`` of ``a``."""
    row = list(range(len(b) + 1))
    for char in a:
        _add(row, char, b)
    return row[-1]


def _add(row: list[int], char: str, b: str) -> None:
    """One more letter of ``a`` in the table of distances between its beginning and the beginnings of ``b``."""
    diagonal, row[0] = row[0], row[0] + 1
    for j, char_b in enumerate(b, 1):
        diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char != char_b))


def normalised_edit_distance(a: str, b: str) -> float:
    """Edit distance divided by the length of the longer text: 0 for equal texts, 1 where nothing agrees."""
    return edit_distance(a, b) / max(len(a), len(b), 1)


def _squeeze(text: str) -> str:
    return "".join(text.split()).lower()


def share_wrong_in_line(text: str, wanted: str) -> float:
    """All of the text against the wanted one."""
    return normalised_edit_distance(_squeeze(text), wanted)


def share_wrong_in_words(text: str, wanted: str) -> float:
    """The nearest run of whole words against the wanted text; 1 where no word is nearer than none at all."""
    fresh = range(len(wanted) + 1)  # distances of a run that begins here
    row, best = list(fresh), len(wanted)
    for word in WORD.findall(text.lower()):
        row = [min(pair) for pair in zip(row, fresh, strict=True)]
        for char in word:
            _add(row, char, wanted)
        best = min(best, row[-1])
    return best / len(wanted)


def share_wrong_unless_contained(text: str, wanted: str) -> float:
    """As published with Flow-GRPO: right where the text contains the wanted one, else all of it counts, at most 1."""
    text = _squeeze(text)
    return 0.0 if wanted in text else min(edit_distance(text, wanted) / len(wanted), 1.0)


@register_reward("ocr", package="rapidocr")
def compute_score_ocr(
    images: list,
    ground_truths: list[str],
    prompts: list[str] | None = None,
    extra_infos: list[dict] | None = None,
    *,
    matching: Matching = "words",
    num_threads: Threads = 1,
) -> list[dict[str, Any]]:
    """Does the scene show the ground truth? Score = 1 - edit distance / length of the ground truth.

    As in the OCR task of Flow-GRPO (arXiv 2505.05470), upper and lower case are the same, spaces do not count, and
    other text in the scene costs nothing. ``matching`` says what the ground truth is compared with: "words" with the
    nearest run of whole words, "contains" as published, where "Start" shows "art", and one wrong letter beside other
    text makes a 0. ``num_threads`` is that of :func:`read_text`.

    Returns for each image ``score``, ``ocr_text`` (what was read) and ``exact`` (1.0 where nothing is wrong, else 0.0).
    """
    if matching not in get_args(Matching):
        raise ValueError(unknown("matching", matching, get_args(Matching)))
    share_wrong = share_wrong_in_words if matching == "words" else share_wrong_unless_contained
    return _scores(images, ground_truths, "full", share_wrong, num_threads)


@register_reward("ocr_line", package="rapidocr")
def compute_score_ocr_line(
    images: list,
    ground_truths: list[str],
    prompts: list[str] | None = None,
    extra_infos: list[dict] | None = None,
    *,
    num_threads: Threads = 1,
) -> list[dict[str, Any]]:
    """For images that are one line of text from edge to edge: score = 1 - normalised edit distance.

    Case and spaces do not count, all that is read does. Arguments and answers are those of :func:`compute_score_ocr`.
    """
    return _scores(images, ground_truths, "line", share_wrong_in_line, num_threads)


def _scores(
    images: list, ground_truths: list[str], mode: Mode, share_wrong: Callable[[str, str], float], num_threads: int
) -> list[dict[str, Any]]:
    if len(images) != len(ground_truths):
        raise ValueError(f"{len(images)} images but {len(ground_truths)} ground truths")
    for index, truth in enumerate(ground_truths):
        if not isinstance(truth, str) or not _squeeze(truth):
            raise ValueError(
                f"the OCR reward needs the text to read as ground truth, and that of image {index} is {truth!r}"
            )
    results = []
    for text, truth in zip(read_text(images, mode, num_threads), ground_truths, strict=True):
        wrong = share_wrong(text, _squeeze(truth))
        results.append({"score": 1.0 - wrong, "ocr_text": text, "exact": float(wrong == 0)})
    return results
