"""What a model may answer with, by kind: an image, a video, a sound, a video with sound, a text; or latents of them.

All that differs between them on their way is said here: how to tell one, the file that people open, and what a reward
function is given by the name of its parameter. How a page shows the file is `verl_omni.report.galleries.SHOWN`.
"""

import importlib.util
import io
import wave
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # a reward is asked for the first time before anybody waits for torch
    import torch


@dataclass(frozen=True)
class Sound:
    """`samples` are floats in [-1, 1], channels x time."""

    samples: "torch.Tensor" = field(repr=False)
    sample_rate: int


@dataclass(frozen=True)
class Video:
    """`frames` are pixels, frames x channels x height x width, made to be seen at `frame_rate`.

    Pixels alone are a video too, of which nobody says how fast it is: files show `pictures.FRAME_RATE` a second.
    """

    frames: "torch.Tensor" = field(repr=False)
    frame_rate: float


@dataclass(frozen=True)
class VideoWithSound:
    """`frames` are pixels as of a video; both begin at once."""

    frames: "torch.Tensor" = field(repr=False)
    sound: Sound
    frame_rate: float


@dataclass(frozen=True)
class Latents:
    """What a model drew, before it is decoded (`reward.input=latents`): all that a reward is given of it.

    `values` are floats, in the scale that the model draws in. `decoded` is for people: None where nobody will look.
    """

    values: "torch.Tensor" = field(repr=False)
    decoded: "torch.Tensor | Sound | Video | VideoWithSound | None" = field(default=None, repr=False)


Response: TypeAlias = "torch.Tensor | Sound | Video | VideoWithSound | str | Latents"


@dataclass(frozen=True)
class Kind:
    name: str
    #: a response of this kind, in words
    form: str
    is_one: Callable[[Any], bool]
    #: (what is in the file, the ending of its name)
    file: Callable[[Any], tuple[bytes, str]]
    #: parameter of a reward function -> what it is given, made when it is asked for
    given: dict[str, Callable[[Any], Any]]
    #: without which its file cannot be written
    package: str | None = None

    @property
    def is_seen(self) -> bool:
        """Whether it has pictures, with or without a sound."""
        return "image" in self.given


def _pixels(dimensions: int) -> Callable[[Any], bool]:
    ours = Sound | Video | VideoWithSound | Latents | str
    return lambda one: not isinstance(one, ours) and getattr(one, "ndim", None) == dimensions


def _floats(pixels: "torch.Tensor") -> "torch.Tensor":
    return pixels.float() if pixels.is_floating_point() else pixels.float() / 255


def _picture(pixels: "torch.Tensor") -> Any:
    from verl_omni.utils.pictures import as_pil

    return as_pil(pixels)


def _picture_file(pixels: "torch.Tensor") -> tuple[bytes, str]:
    from verl_omni.utils.pictures import picture_file

    return picture_file(pixels)


def _video_file(response: "Video | torch.Tensor") -> tuple[bytes, str]:
    from verl_omni.utils.pictures import video_file

    return video_file(pixels_of(response), _frame_rate(response))


def pixels_of(response: "torch.Tensor | Video | VideoWithSound") -> "torch.Tensor":
    """Of an image or a video, with sound or without."""
    return response.frames if isinstance(response, Video | VideoWithSound) else response


def _frame_rate(response: "Video | VideoWithSound | torch.Tensor") -> float:
    from verl_omni.utils.pictures import FRAME_RATE

    return response.frame_rate if isinstance(response, Video | VideoWithSound) else FRAME_RATE


def videos_with_sound(
    decoded: "tuple[torch.Tensor, torch.Tensor]", sample_rate: int, frame_rate: float
) -> list[VideoWithSound]:
    """Of videos (B, F, 3, H, W) in [0, 1] and waves (B, channels, time)."""
    import torch

    videos, waves = decoded
    frames = (videos * 255).round().to(torch.uint8).cpu()
    sounds = [Sound(wave.clamp(-1, 1).cpu(), sample_rate) for wave in waves]
    return [VideoWithSound(*pair, frame_rate) for pair in zip(frames, sounds, strict=True)]


def wav_file(sound: Sound) -> bytes:
    """16 bits a sample. What is beyond [-1, 1] is clipped; NaN is an error."""
    check_sound(sound)
    whole = (sound.samples.float().clamp(-1, 1) * 32767).round().short()
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(whole.shape[0])
        out.setsampwidth(2)
        out.setframerate(sound.sample_rate)
        out.writeframes(whole.T.contiguous().numpy().astype("<i2").tobytes())
    return file.getvalue()


def check_sound(sound: Sound) -> None:
    """NaN would become silence, and silence would be scored and learned from."""
    if sound.samples.ndim != 2 or not sound.samples.is_floating_point() or sound.sample_rate <= 0:
        raise ValueError(
            f"a sound of shape {tuple(sound.samples.shape)}, {sound.samples.dtype}, at {sound.sample_rate} Hz: "
            "expected floats, channels x time, and a sample rate above 0"
        )
    if not sound.samples.isfinite().all():
        raise ValueError("a sound has NaN or infinite samples: the model that made it has diverged")


def _movie_file(response: VideoWithSound) -> tuple[bytes, str]:
    from verl_omni.utils.movies import mp4_file

    check_sound(response.sound)
    return mp4_file(response.frames, response.frame_rate, response.sound.samples, response.sound.sample_rate), "mp4"


def check_package(kind: Kind) -> None:
    """Its files can be written, or one line says what to install."""
    if kind.package is not None and importlib.util.find_spec(kind.package) is None:
        raise ModuleNotFoundError(
            f"a {kind.name} is written as a file with the package {kind.package}, which is not installed here: "
            "pip install 'verl-omni[video]'"
        )


PICTURE = {"solution_image": _floats, "image": _picture}
VIDEO = {name: lambda one, give=give: give(pixels_of(one)) for name, give in {**PICTURE, "video": _floats}.items()} | {
    "frame_rate": _frame_rate
}
SOUND = {"audio": lambda sound: sound.samples, "sample_rate": lambda sound: sound.sample_rate}
VIDEO_WITH_SOUND = VIDEO | {name: lambda one, give=give: give(one.sound) for name, give in SOUND.items()}
KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("image", "a tensor, channels x height x width", _pixels(3), _picture_file, PICTURE),
        Kind(
            "video",
            "a verl_omni.utils.responses.Video, or a tensor, frames x channels x height x width",
            lambda one: isinstance(one, Video) or _pixels(4)(one),
            _video_file,
            VIDEO,
        ),
        Kind(
            "sound",
            "a verl_omni.utils.responses.Sound",
            lambda one: isinstance(one, Sound),
            lambda sound: (wav_file(sound), "wav"),
            SOUND,
        ),
        Kind(
            "video with sound",
            "a verl_omni.utils.responses.VideoWithSound",
            lambda one: isinstance(one, VideoWithSound),
            _movie_file,
            VIDEO_WITH_SOUND,
            package="av",
        ),
        Kind(
            "text",
            "a str",
            lambda one: isinstance(one, str),
            lambda text: (text.encode(), "txt"),
            {"text": lambda text: text},
        ),
        Kind(
            "latents",
            "a verl_omni.utils.responses.Latents",
            lambda one: isinstance(one, Latents),
            lambda one: kind_of(one.decoded).file(one.decoded),
            {"latent": lambda one: one.values},
        ),
    )
}
#: every parameter that some kind gives, for one sample and (plural) for many
GIVEN = tuple(dict.fromkeys(name for kind in KINDS.values() for name in kind.given))
GIVEN_MANY = tuple(f"{name}s" for name in GIVEN)


def kind_of(response: Response) -> Kind:
    for kind in KINDS.values():
        if kind.is_one(response):
            return kind
    shape = f" of shape {tuple(response.shape)}" if hasattr(response, "shape") else ""
    known = "; ".join(f"{kind.name}: {kind.form}" for kind in KINDS.values())
    raise ValueError(f"a response is a {type(response).__name__}{shape}, which is none of {known}")


def write_response(response: Response, file: Path) -> str:
    """Write it as `<file>.<ending>`; the file's name."""
    (content, ending), file = kind_of(response).file(response), Path(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    path = file.with_name(f"{file.name}.{ending}")
    path.write_bytes(content)
    return path.name


def read_response(path: Path) -> Response:
    """What is in a file, of any kind. Pictures are floats in [0, 1], (3, H, W), frames of animations (F, 3, H, W)."""
    return READ.get(path.suffix.lower(), _read_picture)(path)


def _read_picture(path: Path) -> "torch.Tensor":
    import numpy as np
    import torch

    from verl_omni.utils.image_files import frames_in

    frames = [np.array(frame) for frame in frames_in(path)]
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).float() / 255
    return pixels if len(frames) > 1 else pixels[0]


def _read_wav(path: Path) -> Sound:
    import torch

    from verl_omni.utils.regular_files import open_regular

    try:
        with open_regular(path) as file, wave.open(file) as sound:
            channels, width, count = sound.getnchannels(), sound.getsampwidth(), sound.getnframes()
            if width != 2:
                raise ValueError(f"{8 * width} bits a sample: expected 16")
            whole = torch.frombuffer(bytearray(sound.readframes(count)), dtype=torch.int16).view(-1, channels).T
            return Sound(whole.float() / 32767, sound.getframerate())
    except (wave.Error, EOFError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as a sound: {error or 'it is cut off'}") from error


def _read_mp4(path: Path) -> "Video | VideoWithSound":
    import torch

    from verl_omni.utils.image_files import opened_mp4
    from verl_omni.utils.movies import frames_and_sound

    with opened_mp4(path) as content:
        frames, frame_rate, heard = frames_and_sound(content)
    if heard is None:
        return Video(_floats(frames), frame_rate)
    return VideoWithSound(frames, Sound(torch.from_numpy(heard[0]), heard[1]), frame_rate)


READ: dict[str, Callable[[Path], Response]] = {
    ".wav": _read_wav,
    ".mp4": _read_mp4,
    ".txt": lambda path: path.read_text(encoding="utf-8"),
}
