"""Does an image show the wanted text? Read it with a real OCR (rapidocr) and compare."""

import re
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args

import numpy as np

from verl_omni.config.knob import Range
from verl_omni.rewards.images import to_rgb_array
from verl_omni.rewards.registry import register_reward
from verl_omni.utils.suggest import unknown

Mode = Literal["line", "full"]
Matching = Literal["words", "contains"]
Threads = Annotated[int, Range(least=1)]

# A recogniser drops spaces here and there ("EST.1987"), but hardly between two letters. Han and kana need none.
WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\d+(?:[.,:]\d+)*|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+|[^\w\s]|_")

_readers: dict[int, "TextReader"] = {}
_readers_lock = threading.Lock()


class TextReader:
    """rapidocr with its models loaded once. Create it with :func:`get_reader`."""

    def __init__(self, num_threads: int = 1):
        try:
            from rapidocr import RapidOCR
        except ImportError as error:
            raise ImportError("the OCR reward needs rapidocr: pip install 'verl-omni[rewards]'") from error

        self._pipeline = RapidOCR(
            params={
                "Global.log_level": "critical",
                "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
                # The recogniser pads each crop to at least this shape: by default to a width of 320, which makes a
                # crop of 96 four times slower, and changes what is read from it.
                "Rec.rec_img_shape": [3, 48, 16],
                "Rec.rec_batch_num": 8,
            }
        )
        # rapidocr loads a model when it is first used.
        self._pipeline(np.full((48, 48, 3), 255, np.uint8), use_det=False, use_cls=False, use_rec=True)
        self._recogniser = self._pipeline.text_rec

    def read_lines(self, images: list[np.ndarray]) -> list[str]:
        """Recogniser only: each image, scaled to a height of 48, is one line of text."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        # Crops of different widths in one batch would be padded to the widest, and then what is read from an image
        # would depend on the others.
        by_shape = defaultdict(list)
        for index, image in enumerate(images):
            by_shape[image.shape].append(index)
        texts = [""] * len(images)
        for indices in by_shape.values():
            found = self._recogniser(TextRecInput(img=[images[i] for i in indices], return_word_box=False))
            for index, text in zip(indices, found.txts, strict=True):
                texts[index] = text
        return texts

    def read_scene(self, image: np.ndarray) -> str:
        """Detector and recogniser: all texts found in the image, in reading order, joined by spaces."""
        found = self._pipeline(image, use_det=True, use_cls=True, use_rec=True)
        return " ".join(getattr(found, "txts", None) or ())


def get_reader(num_threads: int = 1) -> TextReader:
    """The reader of this process, created by the first call."""
    with _readers_lock:
        if num_threads not in _readers:
            _readers[num_threads] = TextReader(num_threads)
        return _readers[num_threads]


def read_text(images: list, mode: Mode = "full", num_threads: int = 1) -> list[str]:
    """What the OCR reads in each image (see :func:`to_rgb_array` for the forms that an image may have).

    Args:
        mode: "full" for a scene with text somewhere: a detector finds the places first, and all that they say is
            joined. "line" when an image is one line of text from edge to edge: it goes straight to the recogniser,
            some milliseconds an image.
        num_threads: threads of onnxruntime.
    """
    if mode not in ("line", "full"):
        raise ValueError(f'mode must be "line" or "full", not {mode!r}')
    # rapidocr takes arrays for BGR, as OpenCV does.
    arrays = [np.ascontiguousarray(to_rgb_array(image)[:, :, ::-1]) for image in images]
    reader = get_reader(num_threads)
    return reader.read_lines(arrays) if mode == "line" else [reader.read_scene(array) for array in arrays]


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
