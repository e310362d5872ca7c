"""Kinds of what a model makes: told apart, written as files that others read, answered over HTTP, shown on a page."""

import base64
import io
import wave

import pytest
import torch
from PIL import Image

from verl_omni.report.galleries import SHOWN, best_and_worst, read_samples
from verl_omni.trainer.checks.reward_trial import TRIED
from verl_omni.utils.responses import GIVEN, KINDS, Sound, kind_of, write_response
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.image_http import as_json

RAMP = Sound(torch.tensor([[-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0], [0.0] * 7]), 16_000)
ONES = {
    "image": torch.full((3, 4, 6), 51, dtype=torch.uint8),
    "video": torch.full((2, 3, 4, 6), 51, dtype=torch.uint8),
    "sound": RAMP,
    "text": "3 < 5 & ü",
}


def test_every_kind_is_known_wherever_they_are_told_apart():
    assert KINDS.keys() == ONES.keys() == SHOWN.keys() == TRIED.keys()
    assert [kind_of(one).name for one in ONES.values()] == list(ONES)
    assert set(GIVEN) == {"solution_image", "image", "audio", "sample_rate", "text"}


@pytest.mark.parametrize("one", [torch.zeros(4, 4), torch.zeros(1, 2, 3, 4, 4), b"bytes", None])
def test_what_is_of_no_kind_is_refused_in_one_line(one):
    with pytest.raises(ValueError, match="^a response is a .* which is none of image: [^\n]*$"):
        kind_of(one)


def test_an_engine_that_says_another_kind_than_it_answers():
    assert RolloutOutput("words").modality == "text" and RolloutOutput(ONES["video"]).modality == "video"
    with pytest.raises(ValueError, match="says that it made a image, and its response is a text"):
        RolloutOutput("words", modality="image")
    assert RolloutOutput(RAMP).cpu().response.samples is not RAMP.samples


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
    """Pictures as OpenAI has them; of others the kind too."""
    assert as_json(ONES["image"]).keys() == as_json(ONES["video"]).keys() == {"b64_json"}
    assert Image.open(io.BytesIO(base64.b64decode(as_json(ONES["image"])["b64_json"]))).size == (6, 4)
    sound = as_json(RAMP)
    assert (sound["kind"], sound["format"]) == ("sound", "wav")
    assert wave.open(io.BytesIO(base64.b64decode(sound["b64_json"]))).getnframes() == 7
    assert as_json("words") == {"kind": "text", "text": "words"}


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
