"""Images, sounds and texts inside a page."""

import base64
import importlib.util
import io
import wave
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from verl_omni.utils.image_files import opened_image
from verl_omni.utils.movies import is_mp4
from verl_omni.utils.regular_files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL = 256
MOST_TEXT = 4000  # characters


def data_uri(path: Path) -> str:
    """Large ones as thumbnails, so that the page stays light; animations as they are."""
    with opened_image(path) as image:
        if image.format == "GIF":
            return "data:image/gif;base64," + base64.b64encode(path.read_bytes()).decode()
        return _thumbnail(image)


def picture_or_player(path: Path, alt: str, more: str = "") -> str:
    """An image, or a video as mp4 or animation; `more` are attributes, each with a space behind it."""
    if path.suffix.lower() == ".mp4":
        return movie_player(path, alt, more)
    return f'<img {more}alt="{alt}" src="{data_uri(path)}">'


def _thumbnail(image: "Image") -> str:
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def sound_player(path: Path, alt: str) -> str:
    """A wav file, which the page plays by itself, below its waveform."""
    with open_regular(path) as file:
        content = file.read()
    try:
        with wave.open(io.BytesIO(content)) as sound:
            channels, width, count = sound.getnchannels(), sound.getsampwidth(), sound.getnframes()
            samples = np.frombuffer(sound.readframes(count), dtype=f"<i{width}").reshape(-1, channels).T
    except (wave.Error, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a sound: {error or 'it is cut off'}") from error
    data = base64.b64encode(content).decode()
    drawn = waveform(samples / 2 ** (8 * width - 1))
    return f'{drawn}<audio controls aria-label="{alt}" src="data:audio/wav;base64,{data}"></audio>'


def movie_player(path: Path, alt: str, more: str = "") -> str:
    """An mp4 file, which the page plays by itself, with a frame of its middle and below it the waveform of its sound.

    Both are left out where PyAV, which wrote the file, is not installed.
    """
    with open_regular(path) as file:
        content = file.read()
    if not is_mp4(content):
        raise ValueError(f"{path} cannot be read as a video: it is no mp4 file")
    poster, drawn = "", ""
    if importlib.util.find_spec("av") is not None:
        from verl_omni.utils.movies import poster_and_wave

        try:
            frame, samples = poster_and_wave(content)
        except Exception as error:  # whatever a codec finds wrong with a file
            raise ValueError(f"{path} cannot be read as a video: {type(error).__name__}: {error}") from error
        poster = f' poster="{_thumbnail(frame)}"'
        drawn = "" if samples is None else waveform(samples)
    data = base64.b64encode(content).decode()
    told = f'controls loop preload="metadata" aria-label="{alt}"{poster}'
    return f'<video {more}{told} src="data:video/mp4;base64,{data}"></video>{drawn}'


def waveform(samples: np.ndarray, columns: int = 160, height: int = 40) -> str:
    """Of a sound, channels x time in [-1, 1]: from the lowest to the highest sample of each part of its time."""
    time = samples.shape[1]
    if not time:
        return ""
    ends = np.linspace(0, time, min(columns, time) + 1).astype(int)
    parts = [samples[:, start:end] for start, end in zip(ends, ends[1:], strict=False)]
    low, high = ([edge(part) for part in parts] for edge in (np.min, np.max))
    points = [*enumerate(high), *reversed([*enumerate(low)])]
    line = " ".join(f"{x},{height / 2 * (1 - min(1.0, max(-1.0, float(y)))):.1f}" for x, y in points)
    return (
        f'<svg class="wave" viewBox="0 0 {len(parts) - 1 or 1} {height}" preserveAspectRatio="none" aria-hidden="true">'
        f'<polygon points="{line}"/></svg>'
    )


def text_in(path: Path) -> str:
    """A long one as its beginning."""
    with open_regular(path) as file:
        text = file.read(4 * MOST_TEXT).decode(errors="replace")
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " ..."
