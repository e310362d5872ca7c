"""Does an image show the wanted text? Read it with a real OCR (rapidocr) and compare."""

import threading
from collections import defaultdict
from typing import Any, Literal

import numpy as np

from verl_omni.utils.reward_score.images import to_rgb_array
from verl_omni.utils.reward_score.registry import register_reward

Mode = Literal["line", "full"]

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


def read_text(images: list, mode: Mode = "line", num_threads: int = 1) -> list[str]:
    """What the OCR reads in each image (see :func:`to_rgb_array` for the forms that an image may have).

    Args:
        mode: "line" when an image is one line of text from edge to edge: it goes straight to the recogniser, some
            milliseconds an image. "full" for a scene with text somewhere: a detector finds the places first, and all
            that they say is joined.
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
    for i, char_a in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, char_b in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (char_a != char_b))
    return row[-1]


def normalised_edit_distance(a: str, b: str) -> float:
    """Edit distance divided by the length of the longer text: 0 for equal texts, 1 where nothing agrees."""
    return edit_distance(a, b) / max(len(a), len(b), 1)


def _squeeze(text: str) -> str:
    return "".join(text.split()).lower()


@register_reward("ocr")
def compute_score_ocr(
    images: list,
    ground_truths: list[str],
    prompts: list[str] | None = None,
    extra_infos: list[dict] | None = None,
    *,
    mode: Mode = "line",
    num_threads: int = 1,
) -> list[dict[str, Any]]:
    """Score = 1 - normalised edit distance between what the OCR reads and the ground truth.

    As in the OCR task of Flow-GRPO (arXiv 2505.05470), upper and lower case are the same and spaces do not count.
    ``mode`` and ``num_threads`` are those of :func:`read_text`. With ``mode="full"`` a scene may show other text too,
    and, again as in Flow-GRPO, that costs nothing: a reading that contains the ground truth scores 1, and the
    distance is counted against the ground truth's length alone, at most 1.

    Returns for each image ``score``, ``ocr_text`` (what was read) and ``exact`` (1.0 where nothing is wrong, else 0.0).
    """
    if len(images) != len(ground_truths):
        raise ValueError(f"{len(images)} images but {len(ground_truths)} ground truths")
    for index, truth in enumerate(ground_truths):
        if not isinstance(truth, str) or not _squeeze(truth):
            raise ValueError(
                f"the OCR reward needs the text to read as ground truth, and that of image {index} is {truth!r}"
            )

    results = []
    for text, truth in zip(read_text(images, mode, num_threads), ground_truths, strict=True):
        read, wanted = _squeeze(text), _squeeze(truth)
        if mode == "line":
            distance = normalised_edit_distance(read, wanted)
        else:
            distance = 0.0 if wanted in read else min(edit_distance(read, wanted) / len(wanted), 1.0)
        results.append({"score": 1.0 - distance, "ocr_text": text, "exact": float(distance == 0)})
    return results
