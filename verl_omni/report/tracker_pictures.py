"""A run's images, videos and sounds in the trackers that people look at, each by its own library."""

import importlib.util
import io
import wave
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_omni.report.galleries import file_of, read_samples
from verl_omni.utils.image_files import opened_image
from verl_omni.utils.readable import readable

MOST = 16  # of a step: trackers keep all of them for ever


@dataclass(frozen=True)
class Picture:
    """A file that a tracker shows or plays; `name` is the same at every step for the same prompt."""

    name: str
    file: Path
    caption: str

    @property
    def moves(self) -> bool:
        return self.file.suffix in (".gif", ".mp4")

    @property
    def sounds(self) -> bool:
        return self.file.suffix == ".wav"


def pictures_in(folder: Path, kind: str) -> list[Picture]:
    """The first ones of a step that was validated, or whose best and worst images were kept."""
    found = []
    for row in list(read_samples(folder))[:MOST]:
        if row.get("kind") == "text":
            continue
        score = "its reward failed" if row["score"] is None else readable(row["score"])
        file = folder / file_of(row)
        found.append(Picture(f"{kind}/{file.stem}", file, f"{score}: {row['prompt']}"))
    return found


def to_wandb(wandb: Any, pictures: Sequence[Picture], step: int) -> None:
    """One panel for each kind of picture, and one for each sound: for a list of them it wants a further package."""
    panels: dict[str, Any] = {}
    for one in pictures:
        if one.sounds:
            panels[f"sounds/{one.name}"] = wandb.Audio(str(one.file), caption=one.caption)
        else:
            kind, place = (wandb.Video, "videos") if one.moves else (wandb.Image, "images")
            panel = panels.setdefault(f"{place}/{one.name.split('/')[0]}", [])
            panel.append(kind(str(one.file), caption=one.caption))
    wandb.log(panels, step=step)


def to_tensorboard(adapter: Any, pictures: Sequence[Picture], step: int) -> None:
    """The files as they are: TensorBoard shows a GIF as an animation, and plays a wav. It has no place for an mp4: its
    frames are a GIF and its sound is a wav, where PyAV can read them."""
    for one in pictures:
        place = "sounds" if one.sounds else "images"
        adapter.writer.add_text(f"{place}/{one.name}", one.caption, step)
        if one.file.suffix != ".mp4":
            shown = {place: one.file.read_bytes()}
        elif importlib.util.find_spec("av") is not None:
            shown = _halves(one.file)
        else:
            continue
        for place, content in shown.items():
            adapter.writer.file_writer.add_summary(_summary(f"{place}/{one.name}", place, content), step)


def _halves(mp4: Path) -> dict[str, bytes]:
    from verl_omni.utils.pictures import animation, as_pil  # torch
    from verl_omni.utils.responses import VideoWithSound, pixels_of, read_response, wav_file

    response = read_response(mp4)
    if not isinstance(response, VideoWithSound):
        return {"images": animation(as_pil(pixels_of(response)), response.frame_rate)}
    return {"images": animation(as_pil(response.frames), response.frame_rate), "sounds": wav_file(response.sound)}


def _summary(tag: str, place: str, content: bytes) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary

    if place == "images":
        with opened_image(content) as image:
            width, height = image.size
        encoded = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=content)
        return Summary(value=[Summary.Value(tag=tag, image=encoded)])
    with wave.open(io.BytesIO(content)) as sound:
        rate, channels, count = sound.getframerate(), sound.getnchannels(), sound.getnframes()
    encoded = Summary.Audio(
        sample_rate=rate,
        num_channels=channels,
        length_frames=count,
        content_type="audio/wav",
        encoded_audio_string=content,
    )
    return Summary(value=[Summary.Value(tag=tag, audio=encoded)])


def to_mlflow(adapter: Any, pictures: Sequence[Picture], step: int) -> None:
    """Images by step; animations as artifacts, for which MLflow has no steps."""
    import mlflow

    for one in pictures:
        if one.moves or one.sounds:
            place = "sounds" if one.sounds else "videos"
            mlflow.log_artifact(str(one.file), artifact_path=f"{place}/step_{step}/{one.name.split('/')[0]}")
        else:
            with opened_image(one.file) as image:
                mlflow.log_image(image.convert("RGB"), key=f"images/{one.name}", step=step)


def to_trackio(adapter: Any, pictures: Sequence[Picture], step: int) -> None:
    trackio = adapter.trackio
    shown = {
        f"images/{one.name}": trackio.Audio(str(one.file), caption=one.caption)
        if one.sounds
        else trackio.Video(str(one.file), caption=one.caption, format=one.file.suffix[1:])
        if one.moves
        else trackio.Image(str(one.file), caption=one.caption)
        for one in pictures
    }
    trackio.log(shown, step=step)


SENDERS: Mapping[str, Callable[[Any, Sequence[Picture], int], None]] = {
    "wandb": to_wandb,
    "tensorboard": to_tensorboard,
    "mlflow": to_mlflow,
    "trackio": to_trackio,
}


class TrackerPictures:
    """Sends what a step has left in the run's folder, once. A tracker that does not take them ends no run."""

    def __init__(self, run_dir: Path, trackers: Mapping[str, Any]):
        self.run_dir = run_dir
        self.trackers = {name: tracker for name, tracker in trackers.items() if name in SENDERS}
        self._sent: set[Path] = set()

    def send(self, step: int) -> None:
        folders = {kind: self.run_dir / kind / f"step_{step}" for kind in ("validation", "training")}
        there = {kind: folder for kind, folder in folders.items() if (folder / "samples.jsonl").is_file()}
        new = {kind: folder for kind, folder in there.items() if folder not in self._sent}
        if not new or not self.trackers:
            return
        self._sent.update(new.values())
        pictures = [one for kind, folder in new.items() for one in pictures_in(folder, kind)]
        for name, tracker in self.trackers.items():
            try:
                SENDERS[name](tracker, pictures, step)
            except Exception as error:  # of a library and its network: anything
                print(f"step {step}: {name} did not take the images: {type(error).__name__}: {error}", flush=True)
