"""A rollout server over HTTP whose model makes a sound, a video or both: files that play, of what diffusers draws."""

import base64
import io
import wave

import diffusers
import numpy as np
import pytest
import torch
from test_image_http import PROMPT, ROLLOUT, post, serving
from tiny_models import tiny_checkpoint

from verl_omni.utils.responses import KINDS, Response, Sound, Video, VideoWithSound

av = pytest.importorskip("av")
PIPELINE = f"{ROLLOUT}.pipeline"
SEED, STEPS = 11, 3
NO_SIZE = [f"{PIPELINE}.height=512", f"{PIPELINE}.width=512"]  # as they are where nobody sets them


def file_of(architecture: str, kind: str, ending: str, *settings: str, **fields) -> io.BytesIO:
    """What a server of this model answers."""
    given = [f"actor_rollout_ref.model.path={tiny_checkpoint(architecture)}", *settings]
    with serving(*given) as server:
        answer = post(server, prompt=PROMPT, seed=SEED, **fields)
    assert answer.status_code == 200, answer.text
    (one,) = answer.json()["data"]
    assert (one["kind"], one["format"], one["seed"]) == (kind, ending, SEED)
    return io.BytesIO(base64.b64decode(one["b64_json"]))


def drawn_by_diffusers(architecture: str, **settings):
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_checkpoint(architecture))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(SEED)
    return pipe, pipe(PROMPT, num_inference_steps=STEPS, generator=generator, output_type="pt", **settings)


def frames_in(file: io.BytesIO) -> np.ndarray:
    file.seek(0)
    with av.open(file) as opened:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in opened.decode(video=0)])


def assert_shows(file: io.BytesIO, kind: str, expected: Response) -> None:
    """But for what every such file loses of a noisy picture."""
    expected = frames_in(io.BytesIO(KINDS[kind].file(expected)[0])).astype(int)
    shown = frames_in(file).astype(int)
    assert shown.shape == expected.shape
    assert np.abs(shown - expected).mean() < 1 < expected.std()


def test_a_sound_comes_as_a_wav_file():
    length, guidance = f"{PIPELINE}.audio_duration_s=0.02", f"{PIPELINE}.guidance_scale=3"
    file = file_of("LongCatAudioDiTPipeline", "sound", "wav", *NO_SIZE, length, guidance)
    pipe, made = drawn_by_diffusers("LongCatAudioDiTPipeline", audio_duration_s=0.02, guidance_scale=3.0)
    expected = made[0][0].clamp(-1, 1).numpy()
    with wave.open(file) as opened:
        assert opened.getframerate() == pipe.sample_rate and opened.getnchannels() == expected.shape[0]
        heard = np.frombuffer(opened.readframes(opened.getnframes()), np.int16).reshape(-1, expected.shape[0]).T
    np.testing.assert_allclose(heard / 32767, expected, atol=1e-4)


def test_a_video_comes_as_an_mp4_file():
    file = file_of("WanPipeline", "video", "mp4", f"{PIPELINE}.num_frames=5", guidance_scale=3)
    _, made = drawn_by_diffusers("WanPipeline", height=32, width=48, num_frames=5, guidance_scale=3.0)
    assert_shows(file, "video", Video((made[0][0] * 255).round().to(torch.uint8), 16.0))
    file.seek(0)
    with av.open(file) as opened:
        assert float(opened.streams.video[0].average_rate) == 16


def test_a_video_with_sound_comes_as_one_mp4_file():
    """Its two scales can be asked for. Since 0.40 diffusers' pipeline has more kinds of guidance by default."""
    length = [f"{PIPELINE}.width=64", f"{PIPELINE}.num_frames=5", f"{PIPELINE}.frame_rate=25"]
    scales = {"guidance_scale": 3.0, "audio_guidance_scale": 2.0}
    file = file_of("LTX2Pipeline", "video with sound", "mp4", *length, **scales)
    plain = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
    plain |= {f"audio_{name}": value for name, value in plain.items()} | {"use_cross_timestep": False}
    size = {"height": 32, "width": 64, "num_frames": 5, "frame_rate": 25.0}
    _, made = drawn_by_diffusers("LTX2Pipeline", **size, **scales, **plain)
    both = VideoWithSound((made[0][0] * 255).round().to(torch.uint8), Sound(made[1][0].clamp(-1, 1), 8000), 25.0)
    assert both.frames.shape == (5, 3, 32, 64)
    assert_shows(file, "video with sound", both)
    file.seek(0)
    with av.open(file) as opened:
        assert float(opened.streams.video[0].average_rate) == 25
        heard = np.concatenate([frame.to_ndarray() for frame in opened.decode(audio=0)], axis=1)
        assert heard.shape[1] / opened.streams.audio[0].rate == pytest.approx(made[1].shape[-1] / 8000, abs=0.15)
        assert np.abs(heard).max() > 0.01
