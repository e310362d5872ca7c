"""Videos as mp4 files, with their sound or without: H.264 and AAC, which browsers play."""

import collections
import io
import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

RATE = 48000  # whatever a sound has: the codec counts in parts of 1024 samples, which are short then
# Of a file whose middle is shown: more is some other file, or one that was made to keep a page waiting.
MOST_FRAMES, MOST_PIXELS, MOST_SAMPLES = 2000, 2**26, 600 * RATE
LAYOUTS = {1: "mono", 2: "stereo"}


def mp4_file(
    frames: "torch.Tensor", frame_rate: float, audio: "torch.Tensor | None" = None, sample_rate: int = RATE
) -> bytes:
    """`frames` are uint8, F x C x H x W, `audio` floats in [-1, 1], channels x time: one or two of them."""
    import av

    if audio is not None and len(audio) not in LAYOUTS:
        raise ValueError(f"a sound of {len(audio)} channels: a video is written with one or two")
    file = io.BytesIO()
    pixels = _even(frames).permute(0, 2, 3, 1).contiguous().numpy()
    with av.open(file, "w", format="mp4") as out:
        picture = out.add_stream("libx264", rate=Fraction(frame_rate).limit_denominator(1001), options={"crf": "18"})
        picture.height, picture.width, picture.pix_fmt = *pixels.shape[1:3], "yuv420p"
        sound = None if audio is None else out.add_stream("aac", rate=RATE, layout=LAYOUTS[len(audio)])
        for frame in pixels:
            out.mux(picture.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(picture.encode())
        if sound is not None:
            wave = audio.float().clamp(-1, 1).contiguous().numpy()
            heard = av.AudioFrame.from_ndarray(wave, format="fltp", layout=LAYOUTS[len(audio)])
            heard.sample_rate = sample_rate
            out.mux(sound.encode(heard))
            out.mux(sound.encode())
    return file.getvalue()


def is_mp4(content: bytes) -> bool:
    return content[4:8] == b"ftyp"


def frames_of(content: bytes) -> Iterator[Any]:
    """Of an mp4 file: its frames (PIL), one after another."""
    import av

    with av.open(io.BytesIO(content)) as file:
        stream = file.streams.video[0]
        _check_size(stream)
        for frame in file.decode(stream):
            yield frame.to_image()


def poster_and_wave(content: bytes) -> tuple[Any, "np.ndarray | None"]:
    """Of an mp4 file: the frame in its middle (PIL), and its sound, channels x time. One frame is held at a time."""
    import av

    with av.open(io.BytesIO(content)) as file:
        stream = file.streams.video[0]
        _check_size(stream)
        last = collections.deque(itertools.islice(file.decode(stream), stream.frames // 2 + 1), maxlen=1)
        if not last:
            raise ValueError("it has no frames")
        picture = last[0].to_image()
    heard = _sound(content)
    return picture, None if heard is None else heard[0]


def frames_and_sound(content: bytes) -> "tuple[torch.Tensor, float, tuple[np.ndarray, int] | None]":
    """Of an mp4 file: frames (uint8, F x C x H x W), frames a second, its sound (channels x time, samples a second)."""
    import av
    import numpy as np
    import torch

    with av.open(io.BytesIO(content)) as file:
        stream = file.streams.video[0]
        _check_size(stream)
        rate = float(stream.average_rate)
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(stream)])
    return torch.from_numpy(frames).permute(0, 3, 1, 2), rate, _sound(content)


def _sound(content: bytes) -> "tuple[np.ndarray, int] | None":
    """(channels x time, samples a second)."""
    import av
    import numpy as np

    parts, count, rate = [], 0, RATE
    with av.open(io.BytesIO(content)) as file:
        for frame in file.decode(audio=0) if file.streams.audio else ():
            parts.append(frame.to_ndarray())
            count, rate = count + frame.samples, frame.sample_rate
            if count > MOST_SAMPLES:
                raise ValueError(f"its sound has more than {MOST_SAMPLES} samples")
    return (np.concatenate(parts, axis=1), rate) if parts else None


def _check_size(stream: Any) -> None:
    if stream.width * stream.height > MOST_PIXELS or stream.frames > MOST_FRAMES:
        raise ValueError(
            f"{stream.frames} frames of {stream.width} x {stream.height}: expected at most {MOST_FRAMES} of "
            f"{MOST_PIXELS} pixels"
        )


def _even(frames: "torch.Tensor") -> "torch.Tensor":
    """The codec halves both sides of a picture: a last line that has no neighbour comes twice."""
    import torch.nn.functional as F

    height, width = frames.shape[2:]
    if height % 2 or width % 2:
        frames = F.pad(frames.float(), (0, width % 2, 0, height % 2), mode="replicate").to(frames.dtype)
    return frames
