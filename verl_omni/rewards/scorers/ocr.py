"""Does an image show the wanted text? Read it with a real OCR (rapidocr) and compare."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from statistics import fmean
from typing import Annotated, Any, Literal, get_args

from verl_omni.config.knob import MOST_IMAGES, MOST_PROCESSES, Range
from verl_omni.rewards.images import frames_of
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.text_reader import read_text, recogniser_file
from verl_omni.utils.suggest import unknown


@dataclass(frozen=True)
class Readable(Range):
    """A language whose recogniser is there."""

    def check(self, name: str, value: Any) -> None:
        recogniser_file(value, name)


Matching = Literal["words", "exact", "contains", "everything"]
OverFrames = Literal["mean", "best", "worst"]
Threads = Annotated[int, Range(least=1, most=MOST_PROCESSES)]
FrameStep = Annotated[int, Range(least=1, most=MOST_IMAGES)]
Language = Annotated[str, Readable()]

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


def share_wrong_unless_exact(text: str, wanted: str) -> float:
    """Nothing is wrong where a run of whole words is the wanted text, else all of it."""
    return float(share_wrong_in_words(text, wanted) > 0)


SHARE_WRONG: dict[str, Callable[[str, str], float]] = {
    "words": share_wrong_in_words,
    "exact": share_wrong_unless_exact,
    "contains": share_wrong_unless_contained,
    "everything": share_wrong_in_line,
}
OVER_FRAMES: dict[str, Callable[[list[float]], float]] = {"mean": fmean, "best": max, "worst": min}


@register_reward("ocr", package="rapidocr", reads=("ground_truth",))
def compute_score_ocr(
    images: list,
    ground_truths: list[str],
    prompts: list[str] | None = None,
    extra_infos: list[dict] | None = None,
    *,
    matching: Matching = "words",
    language: Language = "en",
    over_frames: OverFrames = "mean",
    frame_step: FrameStep = 1,
    num_threads: Threads = 1,
) -> list[dict[str, Any]]:
    """Does the scene show the ground truth? Score = 1 - edit distance / length of the ground truth.

    As in the OCR task of Flow-GRPO (arXiv 2505.05470), upper and lower case are the same, spaces do not count, and
    other text in the scene costs nothing. ``matching`` says what the ground truth is compared with: "words" with the
    nearest run of whole words, "exact" with the same, where a single wrong letter makes a 0, "contains" as published,
    where "Start" shows "art", and one wrong letter beside other text makes a 0, "everything" with all that is read, in
    which other text counts as wrong (the distance is divided by the longer of the two).

    Of a video each ``frame_step``-th frame is scored, from the first on, and ``over_frames`` says what that comes to.
    ``language`` and ``num_threads`` are those of :func:`read_text`.

    Returns for each image ``score``, ``ocr_text`` (what was read; in a video, what frames say one after the other) and
    ``exact`` (1.0 where nothing is wrong, else 0.0; over the frames of a video as the score).
    """
    if matching not in get_args(Matching):
        raise ValueError(unknown("matching", matching, get_args(Matching)))
    read = partial(read_text, mode="full", num_threads=num_threads, language=language)
    return _scores(images, ground_truths, read, SHARE_WRONG[matching], over_frames, frame_step)


@register_reward("ocr_line", package="rapidocr", reads=("ground_truth",))
def compute_score_ocr_line(
    images: list,
    ground_truths: list[str],
    prompts: list[str] | None = None,
    extra_infos: list[dict] | None = None,
    *,
    language: Language = "en",
    over_frames: OverFrames = "mean",
    frame_step: FrameStep = 1,
    num_threads: Threads = 1,
) -> list[dict[str, Any]]:
    """For images that are one line of text from edge to edge: score = 1 - normalised edit distance.

    Case and spaces do not count, all that is read does. Arguments and answers are those of :func:`compute_score_ocr`.
    """
    read = partial(read_text, mode="line", num_threads=num_threads, language=language)
    return _scores(images, ground_truths, read, share_wrong_in_line, over_frames, frame_step)


def _scores(
    images: list,
    ground_truths: list[str],
    read: Callable[[list], list[str]],
    share_wrong: Callable[[str, str], float],
    over_frames: str,
    frame_step: int,
) -> list[dict[str, Any]]:
    if len(images) != len(ground_truths):
        raise ValueError(f"{len(images)} images but {len(ground_truths)} ground truths")
    for index, truth in enumerate(ground_truths):
        if not isinstance(truth, str) or not _squeeze(truth):
            raise ValueError(
                f"the OCR reward needs the text to read as ground truth, and that of image {index} is {truth!r}"
            )
    if over_frames not in OVER_FRAMES:
        raise ValueError(unknown("over_frames", over_frames, OVER_FRAMES))
    shown = [(frames_of(image) or [image])[::frame_step] for image in images]
    texts = iter(read([frame for frames in shown for frame in frames]))
    results = []
    for frames, truth in zip(shown, ground_truths, strict=True):
        said = list(islice(texts, len(frames)))
        wrong = [share_wrong(text, _squeeze(truth)) for text in said]
        come_to = OVER_FRAMES[over_frames]
        results.append(
            {
                "score": come_to([1.0 - share for share in wrong]),
                "ocr_text": " | ".join(text for text, _ in groupby(said)),
                "exact": come_to([float(share == 0) for share in wrong]),
            }
        )
    return results
