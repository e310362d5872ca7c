"""Reads the text in images with rapidocr, whose models are loaded once in a process."""

import copy
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from verl_omni.rewards.images import to_rgb_array
from verl_omni.utils.suggest import unknown

Mode = Literal["line", "full"]

HEIGHT = 48  # of a line of text, for every recogniser of rapidocr
# Crops from a scene are padded to multiples of this width: many can share a batch, and none is padded by much.
WIDTH_STEP = 32

_readers: dict[tuple[int, str], "TextReader"] = {}
_readers_lock = threading.Lock()


def _rapidocr() -> Any:
    try:
        import rapidocr
    except ImportError as error:
        raise ImportError("the OCR reward needs rapidocr: pip install 'verl-omni[rewards]'") from error
    return rapidocr


class Recogniser(NamedTuple):
    """The file that reads a language, and where rapidocr publishes it."""

    file: Path
    url: str


def recognisers() -> dict[str, Recogniser]:
    """By language. The first file reads some fifty of them and comes with rapidocr; the others have to be fetched."""
    package = _rapidocr()
    from rapidocr.inference_engine.base import FileInfo, InferSession
    from rapidocr.utils.model_resolver import list_supported_langs
    from rapidocr.utils.typings import EngineType, ModelType, OCRVersion, TaskType

    folder, found = Path(package.__file__).parent / "models", {}
    for version, size in (
        (OCRVersion.PPOCRV6, ModelType.SMALL),
        (OCRVersion.PPOCRV5, ModelType.MOBILE),
        (OCRVersion.PPOCRV4, ModelType.MOBILE),
    ):
        for language in list_supported_langs(TaskType.REC, version, size):
            if language not in found:
                info = FileInfo(EngineType.ONNXRUNTIME, version, TaskType.REC, language, size)
                url = InferSession.get_model_url(info)["model_dir"]
                found[language] = Recogniser(folder / Path(url).name, url)
    return found


def recogniser_file(language: str, where: str = "language") -> Path:
    """The file that reads `language`, or one line that says what to type to get it. Nothing is fetched here."""
    known = recognisers()
    if language not in known:
        raise ValueError(unknown(where, language, known))
    file, url = known[language]
    if not file.is_file():
        raise FileNotFoundError(
            f"{where}={language}: rapidocr comes without the recogniser for it; fetch it once: curl -Lo {file} {url}"
        )
    return file


class TextReader:
    """rapidocr with its models loaded once. Create it with :func:`get_reader`."""

    def __init__(self, num_threads: int = 1, language: str = "en"):
        self._pipeline = _rapidocr().RapidOCR(
            params={
                "Global.log_level": "critical",
                "EngineConfig.onnxruntime.intra_op_num_threads": num_threads,
                "Rec.lang_type": language,
                "Rec.model_path": str(recogniser_file(language)),
                # The recogniser pads each crop to at least this shape: by default to a width of 320, which makes a
                # crop of 96 four times slower, and changes what is read from it.
                "Rec.rec_img_shape": [3, HEIGHT, 16],
                "Rec.rec_batch_num": 8,
            }
        )
        # rapidocr loads a model when it is first used.
        self._pipeline(np.full((48, 48, 3), 255, np.uint8), use_det=False, use_cls=False, use_rec=True)
        self._recogniser = self._pipeline.text_rec

    # Crops of different widths in one batch would be padded to the widest, and then what is read from an image would
    # depend on the others. So a batch holds crops that are padded alike, whatever else there is.

    def read_lines(self, images: list[np.ndarray]) -> list[str]:
        """Recogniser only: each image, scaled to a height of 48, is one line of text."""
        found = self._in_groups(images, lambda image: image.shape, lambda shape: self._recogniser)
        return [text for text, _ in found]

    def read_scenes(self, images: list[np.ndarray]) -> list[str]:
        """Detector and recogniser: all texts found in an image, in reading order, joined by spaces."""
        crops = [self._crops(image) for image in images]
        every = [crop for found in crops for crop in found]
        if not every:
            return [""] * len(images)
        upright, _ = self._pipeline.cls_and_rotate(every)
        found = iter(self._in_groups(upright, padded_width, self._padding_to))
        return [" ".join(self._sure(islice(found, len(own)))) for own in crops]

    def _crops(self, image: np.ndarray) -> list[np.ndarray]:
        """The places that look like text, one by one."""
        from rapidocr.main import RapidOCRError

        prepared, record = self._pipeline.preprocess_img(image)
        try:
            return self._pipeline.detect_and_crop(prepared, record)[0]
        except RapidOCRError:  # so it tells that there is none
            return []

    def _sure(self, found: Any) -> list[str]:
        return [text for text, score in found if text.strip() and score >= self._pipeline.text_score]

    def _padding_to(self, width: int) -> Any:
        """The recogniser, padding every crop to this width."""
        recogniser = copy.copy(self._recogniser)  # its model is shared
        recogniser.rec_image_shape = [3, HEIGHT, width]
        return recogniser

    @staticmethod
    def _in_groups(
        crops: list[np.ndarray], key: Callable[[np.ndarray], Hashable], recogniser: Callable[[Any], Any]
    ) -> list[tuple[str, float]]:
        """Text and confidence of each crop; those of one key share batches of the recogniser for that key."""
        from rapidocr.ch_ppocr_rec import TextRecInput

        groups = defaultdict(list)
        for index, crop in enumerate(crops):
            groups[key(crop)].append(index)
        read: dict[int, tuple[str, float]] = {}
        for kind, indices in groups.items():
            found = recogniser(kind)(TextRecInput(img=[crops[i] for i in indices], return_word_box=False))
            read.update(zip(indices, zip(found.txts, found.scores, strict=True), strict=True))
        return [read[index] for index in range(len(crops))]


def padded_width(crop: np.ndarray) -> int:
    """The width of a crop that is scaled to the recogniser's height, rounded up: by itself, not by its neighbours."""
    height, width = crop.shape[:2]
    return math.ceil(HEIGHT * width / height / WIDTH_STEP) * WIDTH_STEP


def get_reader(num_threads: int = 1, language: str = "en") -> TextReader:
    """The reader of this process, created by the first call."""
    with _readers_lock:
        kind = (num_threads, language)
        if kind not in _readers:
            _readers[kind] = TextReader(num_threads, language)
        return _readers[kind]


def read_text(images: list, mode: Mode = "full", num_threads: int = 1, language: str = "en") -> list[str]:
    """What the OCR reads in each image (see :func:`to_rgb_array` for the forms that an image may have).

    Args:
        mode: "full" for a scene with text somewhere: a detector finds the places first, and all that they say is
            joined. "line" when an image is one line of text from edge to edge: it goes straight to the recogniser,
            some milliseconds an image.
        num_threads: threads of onnxruntime.
        language: one of :func:`recognisers`.
    """
    if mode not in ("line", "full"):
        raise ValueError(f'mode must be "line" or "full", not {mode!r}')
    # rapidocr takes arrays for BGR, as OpenCV does.
    arrays = [np.ascontiguousarray(to_rgb_array(image)[:, :, ::-1]) for image in images]
    reader = get_reader(num_threads, language)
    return reader.read_lines(arrays) if mode == "line" else reader.read_scenes(arrays)
