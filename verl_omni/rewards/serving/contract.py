"""How a sample travels: as JSON, written by the client and read by the server within limits."""

import base64
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from verl_omni.rewards.images import to_rgb_array
from verl_omni.utils.errors import Refused
from verl_omni.utils.json_bodies import loads
from verl_omni.utils.suggest import unknown

Encoding = Literal["png", "tensor"]

PICTURES = ("image", "frames", "tensor")
FIELDS = (*PICTURES, "prompt", "ground_truth", "extra_info")
FORMATS = ("PNG", "JPEG", "WEBP")
PIXEL_BYTES = 4  # of Pillow's, also without an alpha channel


@dataclass(frozen=True)
class Limits:
    """What a server takes: bytes of a request and of one file in it, pixels of all images of a request; and of all
    requests together the bytes that came, and those of the images that are decoded at a time."""

    request_bytes: int = 128 * 2**20
    image_bytes: int = 32 * 2**20
    pixels: int = 2**26
    waiting_bytes: int = 512 * 2**20
    decoded_bytes: int = 512 * 2**20

    def __post_init__(self) -> None:
        needed = PIXEL_BYTES * self.pixels + 2 * self.image_bytes
        if self.decoded_bytes < needed:
            raise ValueError(
                f"--max-decoded-bytes {self.decoded_bytes}: expected {needed} or more, for one request of --max-pixels "
                f"{self.pixels} and --max-image-bytes {self.image_bytes}"
            )
        if self.waiting_bytes < self.request_bytes:
            raise ValueError(
                f"--max-waiting-bytes {self.waiting_bytes}: expected --max-request-bytes ({self.request_bytes}) or more"
            )


@dataclass
class Sample:
    """What a scorer is asked about. The image is a PIL image, or a list of them for a video."""

    image: Any
    ground_truth: Any = None
    prompt: str = ""
    extra_info: dict[str, Any] | None = None


def encode(sample: Sample, encoding: Encoding = "png") -> bytes:
    """The body of a request for one sample. No encoding changes a pixel."""
    video = isinstance(sample.image, list)
    if encoding == "tensor":
        picture = {"tensor": _base64(_safetensors(sample.image))}
    elif video:
        picture = {"frames": [_base64(png(frame)) for frame in sample.image]}
    else:
        picture = {"image": _base64(png(sample.image))}
    told = {"prompt": sample.prompt, "ground_truth": sample.ground_truth, "extra_info": sample.extra_info or {}}
    return json.dumps({"samples": [picture | told]}, default=plain).encode()


def png(image: Any) -> bytes:
    """The fastest compression: what is saved on the wire by more costs more than it saves."""
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch, for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.100} cannot be sent as JSON: expected numbers, texts, lists and dicts")


@dataclass
class PackedSample:
    """A sample whose files have been looked at but not decoded: what waits is as small as it came."""

    #: decodes it; whatever is wrong with it then is said by `Refused`
    open: Callable[[], Sample]
    #: what that takes
    decoded_bytes: int


def unpack(body: bytes | bytearray, limits: Limits) -> list[PackedSample]:
    """The samples of a request. Whatever is wrong with it is said by `Refused`."""
    try:
        samples = loads(body)["samples"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise Refused(422, f'the body is not {{"samples": [{{...}}, ...]}} as JSON ({said:.100})') from error
    if not isinstance(samples, list) or not samples or not all(isinstance(sample, dict) for sample in samples):
        raise Refused(422, "samples must be a list of one or more objects")
    reader = _Reader(limits)
    return [reader.sample(index, fields) for index, fields in enumerate(samples)]


class _Reader:
    """Reads the samples of one request, which share a number of pixels."""

    def __init__(self, limits: Limits):
        self.limits, self.pixels_left, self.decoded_bytes = limits, limits.pixels, 0

    def sample(self, index: int, fields: dict[str, Any]) -> PackedSample:
        where = f"sample {index}"
        for key in fields:
            if key not in FIELDS:
                raise Refused(422, f"{where}: {unknown('field', key, FIELDS)}")
        given = [key for key in PICTURES if key in fields]
        if len(given) != 1:
            raise Refused(
                422, f"{where} has {' and '.join(given) or 'no picture'}: expected one of image, frames, tensor"
            )
        prompt, extra_info = fields.get("prompt", ""), fields.get("extra_info") or {}
        if not isinstance(prompt, str) or not isinstance(extra_info, dict):
            raise Refused(422, f"{where}: prompt must be a text and extra_info an object")
        (kind,) = given
        before = self.decoded_bytes
        if kind == "frames":
            frames = fields["frames"]
            if not isinstance(frames, list) or not frames:
                raise Refused(422, f"{where}: frames must be a list of one or more files")
            files = [self._picture(f"frame {i} of {where}", frame) for i, frame in enumerate(frames)]
        elif kind == "image":
            files = [self._picture(f"the image of {where}", fields["image"])]
        else:
            files = [self._tensor(f"the tensor of {where}", fields["tensor"])]
        truth = fields.get("ground_truth")

        def opened() -> Sample:
            images = [decode() for decode in files]
            return Sample(images if kind == "frames" else images[0], truth, prompt, extra_info)

        return PackedSample(opened, self.decoded_bytes - before)

    def _picture(self, what: str, text: Any) -> Callable[[], Any]:
        from PIL import Image

        data = self._bytes(what, text)
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)  # reads the header only
        except Image.DecompressionBombError as error:
            raise Refused(413, f"{what} has too many pixels: {error}") from error
        except Exception as error:
            raise Refused(422, f"{what} is no {', '.join(FORMATS)} file that can be read ({error})") from error
        if getattr(image, "n_frames", 1) != 1:
            raise Refused(422, f"{what} is animated: send a video as frames")
        self._spend(what, image.width * image.height)
        return lambda: _decoded_picture(what, data)

    def _tensor(self, what: str, text: Any) -> Callable[[], Any]:
        data = self._bytes(what, text)
        array = _array(what, data)
        if array.ndim not in (3, 4):
            raise Refused(422, f"{what} has the shape {array.shape}: expected (channels, height, width), frames before")
        self._spend(what, array.size // max(array.shape[-3], 1), 2 * len(data))
        return lambda: _decoded_tensor(what, data)

    def _bytes(self, what: str, text: Any) -> bytes:
        if not isinstance(text, str):
            raise Refused(422, f"{what} must be a file in base64")
        if len(text) * 3 // 4 - 2 > self.limits.image_bytes:
            raise Refused(413, f"{what} has more than {self.limits.image_bytes} bytes: raise --max-image-bytes")
        try:
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            raise Refused(422, f"{what} is not base64 ({error})") from error

    def _spend(self, what: str, pixels: int, more_bytes: int = 0) -> None:
        self.pixels_left -= pixels
        self.decoded_bytes += pixels * PIXEL_BYTES + more_bytes
        if self.pixels_left < 0:
            most = self.limits.pixels
            raise Refused(413, f"with {what} the request has more than {most} pixels: send less, or raise --max-pixels")


def _decoded_picture(what: str, data: bytes) -> Any:
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
        return image if image.mode == "RGB" else image.convert("RGB")  # which copies in any case
    except Exception as error:  # a decoder may raise anything
        raise Refused(422, f"{what} is damaged ({type(error).__name__}: {error})") from error


def _decoded_tensor(what: str, data: bytes) -> Any:
    from PIL import Image

    array = _array(what, data)
    try:
        frames = [
            Image.fromarray(to_rgb_array(frame.transpose(1, 2, 0))) for frame in array.reshape(-1, *array.shape[-3:])
        ]
    except (TypeError, ValueError) as error:
        raise Refused(422, f"{what}: {error}") from error
    return frames if array.ndim == 4 else frames[0]


def _array(what: str, data: bytes) -> Any:
    from safetensors.numpy import load

    try:
        (array,) = load(data).values()
    except Exception as error:
        raise Refused(422, f"{what} is no safetensors file with one tensor ({error})") from error
    return array


def _safetensors(image: Any) -> bytes:
    import numpy as np
    from safetensors.numpy import save

    frames = [to_rgb_array(frame).transpose(2, 0, 1) for frame in (image if isinstance(image, list) else [image])]
    array = np.stack(frames) if isinstance(image, list) else frames[0]
    return save({"image": np.ascontiguousarray(array)})


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
