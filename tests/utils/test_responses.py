"""Kinds of what a model makes: told apart, written as files that others read, answered over HTTP, shown on a page."""

import base64
import importlib.util
import io
import math
import re
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from verl_omni.agent_loop.outputs import written
from verl_omni.report.galleries import SHOWN, best_and_worst, read_samples
from verl_omni.rewards.by_hand import Sample, opened_response
from verl_omni.rewards.reward_function import RewardError
from verl_omni.trainer.checks.reward_trial import TRIED
from verl_omni.utils import movies
from verl_omni.utils.image_files import frames_in
from verl_omni.utils.responses import (
    GIVEN,
    KINDS,
    Latents,
    Sound,
    Video,
    VideoWithSound,
    check_package,
    kind_of,
    read_response,
    write_response,
)
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.image_http import as_json

RAMP = Sound(torch.tensor([[-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], [0.0] * 7]), 16_000)
TONE = Sound(0.5 * torch.sin(torch.arange(3200) * 2 * math.pi * 440 / 8000).expand(2, -1), 8000)
ONES = {
    "image": torch.full((3, 4, 6), 51, dtype=torch.uint8),
    "video": torch.full((2, 3, 4, 6), 51, dtype=torch.uint8),
    "sound": RAMP,
    "video with sound": VideoWithSound(torch.full((5, 3, 34, 48), 51, dtype=torch.uint8), TONE, 12.5),
    "text": "3 < 5 & ü",
}


def test_every_kind_is_known_wherever_they_are_told_apart():
    assert KINDS.keys() - {"latents"} == ONES.keys() == SHOWN.keys() == TRIED.keys()  # which nobody is shown
    assert [kind_of(one).name for one in ONES.values()] == list(ONES)
    assert kind_of(Latents(torch.zeros(4, 2, 2))).name == "latents"
    assert set(GIVEN) == {"solution_image", "image", "video", "audio", "sample_rate", "frame_rate", "text", "latent"}


@pytest.mark.parametrize("one", [torch.zeros(4, 4), torch.zeros(1, 2, 3, 4, 4), b"bytes", None])
def test_what_is_of_no_kind_is_refused_in_one_line(one):
    with pytest.raises(ValueError, match="^a response is a .* which is none of image: [^\n]*$"):
        kind_of(one)


def test_an_engine_that_says_another_kind_than_it_answers():
    assert RolloutOutput("words").modality == "text" and RolloutOutput(ONES["video"]).modality == "video"
    with pytest.raises(ValueError, match="says that it made a image, and its response is a text"):
        RolloutOutput("words", modality="image")
    assert RolloutOutput(RAMP).cpu().response.samples is not RAMP.samples
    both = RolloutOutput(ONES["video with sound"]).cpu().response
    assert both.frames is not ONES["video with sound"].frames and both.sound.samples is not TONE.samples


def test_a_wav_file_is_what_the_standard_library_reads(tmp_path):
    assert write_response(RAMP, tmp_path / "a" / "ramp") == "ramp.wav"
    with wave.open(str(tmp_path / "a/ramp.wav")) as file:
        assert file.getparams()[:4] == (2, 2, 16_000, 7)
        whole = torch.frombuffer(bytearray(file.readframes(7)), dtype=torch.int16).reshape(7, 2)
    assert whole[:, 0].tolist() == [-32767, -32767, -16384, 0, 16384, 32767, 32767]  # clipped, and symmetric
    assert not whole[:, 1].any()


@pytest.mark.parametrize(
    ("samples", "rate", "said"),
    [
        (torch.tensor([[0.0, torch.nan]]), 8000, "NaN or infinite samples"),
        (torch.zeros(8), 8000, r"shape \(8,\)"),
        (torch.zeros(1, 8, dtype=torch.int16), 8000, "expected floats"),
        (torch.zeros(1, 8), 0, "at 0 Hz"),
    ],
)
def test_a_sound_that_is_none_is_never_written(tmp_path, samples, rate, said):
    with pytest.raises(ValueError, match=said):
        write_response(Sound(samples, rate), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_what_a_server_answers():
    """Images as OpenAI has them; of others the kind too."""
    assert as_json(ONES["image"]).keys() == {"b64_json"}
    assert Image.open(io.BytesIO(base64.b64decode(as_json(ONES["image"])["b64_json"]))).size == (6, 4)
    sound = as_json(RAMP)
    assert (sound["kind"], sound["format"]) == ("sound", "wav")
    assert wave.open(io.BytesIO(base64.b64decode(sound["b64_json"]))).getnframes() == 7
    assert as_json("words") == {"kind": "text", "text": "words"}


def test_what_a_reward_is_given_of_a_video_with_sound():
    one, given = ONES["video with sound"], KINDS["video with sound"].given
    assert torch.equal(given["video"](one), one.frames / 255) and given["audio"](one) is TONE.samples
    assert (given["frame_rate"](one), given["sample_rate"](one)) == (12.5, 8000)
    assert [frame.size for frame in given["image"](one)] == [(48, 34)] * 5


def test_without_the_package_that_writes_them_a_run_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"the package av, .*: pip install 'verl-omni\[video\]'"):
        check_package(KINDS["video with sound"])
    for name in ("image", "video", "sound", "text"):
        check_package(KINDS[name])


@pytest.mark.parametrize("rate", [8000, 1600])
def test_an_mp4_file_has_the_frames_and_the_sound(tmp_path, rate):
    """Read back by the library that players use too, with losses that nobody sees or hears."""
    av = pytest.importorskip("av")
    ramp = (torch.arange(5)[:, None, None, None] * 50).expand(5, 3, 34, 48).to(torch.uint8)
    tone = Sound(TONE.samples[:, : rate * 2 // 5], rate)
    assert write_response(VideoWithSound(ramp, tone, 12.5), tmp_path / "one") == "one.mp4"
    with av.open(str(tmp_path / "one.mp4")) as file:
        picture, sound = file.streams.video[0], file.streams.audio[0]
        assert (picture.codec_context.name, picture.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert float(picture.average_rate) == 12.5 and sound.codec_context.name == "aac"
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert shown.shape == (5, 34, 48, 3) and np.abs(shown[:, 5, 5, 0] - np.arange(5) * 50.0).max() <= 3
    with av.open(str(tmp_path / "one.mp4")) as file:
        heard = np.concatenate([frame.to_ndarray() for frame in file.decode(audio=0)], axis=1)
        rate = file.streams.audio[0].rate
    assert heard.shape[0] == 2 and heard.shape[1] / rate == pytest.approx(0.4, abs=0.06)
    middle = heard[0, heard.shape[1] // 4 : heard.shape[1] // 2]
    assert np.sqrt(np.square(middle).mean()) == pytest.approx(0.5 / math.sqrt(2), rel=0.15)


RAMPED = (torch.arange(5)[:, None, None, None] * 50).expand(5, 3, 34, 48).to(torch.uint8)


@pytest.mark.parametrize("pixels", [RAMPED, RAMPED / 255], ids=["bytes", "floats"])
def test_a_video_is_an_mp4_file(tmp_path, pixels):
    av = pytest.importorskip("av")
    assert written(pixels, tmp_path / "one") == {"image": "one.mp4", "kind": "video"}
    with av.open(str(tmp_path / "one.mp4")) as file:
        assert not file.streams.audio and float(file.streams.video[0].average_rate) == 8
        shown = np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])
    assert shown.shape == (5, 34, 48, 3) and np.abs(shown[:, 5, 5, 0] - np.arange(5) * 50.0).max() <= 3
    answered = as_json(pixels)
    assert (answered["kind"], answered["format"]) == ("video", "mp4")
    assert base64.b64decode(answered["b64_json"])[4:8] == b"ftyp"
    player = SHOWN["video"](tmp_path / "one.mp4", "step 1")
    assert "<video " in player and 'poster="data:image/png' in player and "<polygon" not in player
    (tmp_path / "TWO.MP4").write_bytes((tmp_path / "one.mp4").read_bytes())  # as cameras call it
    assert SHOWN["video"](tmp_path / "TWO.MP4", "step 1") == player
    opened = read_response(tmp_path / "one.mp4")  # as `verl-omni score` does
    torch.testing.assert_close(opened.frames, RAMPED / 255, atol=3 / 255, rtol=0)
    assert opened.frame_rate == 8


def test_a_video_is_as_fast_as_its_model_says(tmp_path, monkeypatch):
    """In its file, for who reads that again, and for a reward; and without PyAV."""
    av = pytest.importorskip("av")
    one = Video(RAMPED, 16.0)
    assert written(one, tmp_path / "one") == {"image": "one.mp4", "kind": "video"}
    with av.open(str(tmp_path / "one.mp4")) as file:
        assert float(file.streams.video[0].average_rate) == 16
    given = KINDS["video"].given
    assert [given["frame_rate"](video) for video in (one, read_response(tmp_path / "one.mp4"), RAMPED)] == [16, 16, 8]
    assert torch.equal(given["video"](one), RAMPED / 255) and torch.equal(given["solution_image"](one), RAMPED / 255)
    assert len(given["image"](one)) == len(RAMPED)
    sent = RolloutOutput(one).cpu()
    assert sent.modality == "video" and sent.response.frame_rate == 16 and sent.response.frames is not RAMPED
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert written(one, tmp_path / "two")["image"] == "two.gif"
    with Image.open(tmp_path / "two.gif") as file:
        assert file.info["duration"] == 60  # a sixteenth of a second, in whole hundredths


def test_without_the_package_that_writes_mp4_a_video_is_an_animation(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert written(RAMPED, tmp_path / "one") == {"image": "one.gif", "kind": "video"}
    with Image.open(tmp_path / "one.gif") as moving:
        assert (moving.n_frames, moving.info["duration"]) == (5, 120)  # in hundredths of a second
    assert (as_json(RAMPED)["kind"], as_json(RAMPED)["format"]) == ("video", "gif")
    assert SHOWN["video"](tmp_path / "one.gif", "step 1").startswith('<img alt="step 1" src="data:image/gif')
    assert read_response(tmp_path / "one.gif").shape == (5, 3, 34, 48)
    (tmp_path / "other.mp4").write_bytes(b"\0\0\0\x18ftypmp42")
    with pytest.raises(RewardError, match=r"other.mp4 is read with the package av, .* 'verl-omni\[video\]'"):
        opened_response(Sample(tmp_path / "other.mp4"))


def test_a_video_that_is_cut_off_is_one_line(tmp_path):
    pytest.importorskip("av")
    write_response(RAMPED, tmp_path / "one")
    (tmp_path / "half.mp4").write_bytes((tmp_path / "one.mp4").read_bytes()[:300])
    with pytest.raises(ValueError, match="half.mp4 cannot be read as a video: [^\n]*$"):
        list(frames_in(tmp_path / "half.mp4"))


def test_a_video_with_nan_is_never_written(tmp_path):
    with pytest.raises(ValueError, match="NaN or infinite pixels"):
        write_response(RAMPED / torch.tensor(0.0), tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_odd_sides_are_written_too(tmp_path):
    av = pytest.importorskip("av")
    write_response(VideoWithSound(torch.zeros(3, 3, 33, 47, dtype=torch.uint8), TONE, 24.0), tmp_path / "odd")
    with av.open(str(tmp_path / "odd.mp4")) as file:
        assert (file.streams.video[0].height, file.streams.video[0].width) == (34, 48)


def test_a_page_plays_sounds_and_videos_by_itself(tmp_path):
    """Data in the page, a waveform of the sound, a frame before the video plays."""
    path = tmp_path / write_response(TONE, tmp_path / "tone")
    shown = SHOWN["sound"](path, "step 1")
    assert base64.b64decode(re.search(r'src="data:audio/wav;base64,([^"]+)"', shown)[1]) == path.read_bytes()
    points = [tuple(map(float, pair.split(","))) for pair in re.search(r'points="([^"]+)"', shown)[1].split()]
    assert len(points) == 2 * 160 and min(y for _, y in points) == pytest.approx(10, abs=0.2)  # of 40: half as loud
    pytest.importorskip("av")
    path = tmp_path / write_response(ONES["video with sound"], tmp_path / "both")
    shown = SHOWN["video with sound"](path, "step 1")
    assert base64.b64decode(re.search(r'src="data:video/mp4;base64,([^"]+)"', shown)[1]) == path.read_bytes()
    poster = Image.open(io.BytesIO(base64.b64decode(re.search(r'poster="data:image/png;base64,([^"]+)"', shown)[1])))
    assert poster.size == (48, 34) and max(abs(c - 51) for c in poster.convert("RGB").getpixel((20, 20))) <= 3
    assert "<polygon" in shown and "http" not in shown
    (tmp_path / "none.mp4").write_bytes(b"nothing")
    with pytest.raises(ValueError, match="is no mp4 file"):
        SHOWN["video with sound"](tmp_path / "none.mp4", "step 1")


def test_the_middle_of_a_video_is_shown_and_a_huge_one_is_not_opened(tmp_path, monkeypatch):
    pytest.importorskip("av")
    ramp = (torch.arange(5)[:, None, None, None] * 50).expand(5, 3, 34, 48).to(torch.uint8)
    path = tmp_path / write_response(VideoWithSound(ramp, TONE, 12.5), tmp_path / "ramp")
    poster, samples = movies.poster_and_wave(path.read_bytes())
    assert max(abs(c - 100) for c in poster.getpixel((20, 20))) <= 3 and samples.shape[0] == 2
    for name, most, said in (
        ("MOST_PIXELS", 48 * 34 - 1, "5 frames of 48 x 34"),
        ("MOST_FRAMES", 4, "5 frames of 48 x 34"),
        ("MOST_SAMPLES", 100, "more than 100 samples"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"ramp.mp4 cannot be read.*{said}"):
            patch.setattr(movies, name, most)
            SHOWN["video with sound"](path, "step 1")


def lines(folder, *rows: str) -> None:
    (folder / "training/step_1").mkdir(parents=True)
    (folder / "training/step_1/samples.jsonl").write_text("\n".join(rows) + "\n")


def test_a_page_shows_no_sound_that_is_none_and_nothing_of_other_folders(tmp_path, capsys):
    (tmp_path / "secret.txt").write_text("a key")
    told = '"index": 0, "prompt": "p", "score": 1.0, "reward_extra_info": {}'
    lines(
        tmp_path,
        f'{{{told}, "kind": "sound", "file": "0_best.wav"}}',
        f'{{{told}, "kind": "text", "file": "../../secret.txt"}}',
        f'{{{told}, "kind": "smell", "file": "0_worst.txt"}}',
    )
    (tmp_path / "training/step_1/0_best.wav").write_bytes(b"RIFF")
    (tmp_path / "training/step_1/0_worst.txt").write_text("x")
    page = best_and_worst(tmp_path)
    assert "cannot be read as a sound" in page and "<audio" not in page and "unknown kind of sample" in page
    assert "a key" not in page
    assert len(capsys.readouterr().err.splitlines()) == 2
    (tmp_path / "training/step_1/samples.jsonl").write_text(f'{{{told}, "kind": "text", "file": 7}}\n')
    with pytest.raises(ValueError, match='"file" is 7, which no run writes'):
        read_samples(tmp_path / "training/step_1")
