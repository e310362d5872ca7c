"""A model that makes sound, and a rollout engine of somebody's own that makes text, through whole runs.

What a reward is given, what lies in the run's folder and what the report shows is looked at with the standard library.
"""

import base64
import io
import json
import re
import shutil
import sys
import wave
from pathlib import Path

import pytest
import torch
from e2e_runs import ROOT, drawn_again, metrics, run_here, settings
from tiny_models import tiny_checkpoint

from verl_omni.cli import score
from verl_omni.utils.errors import RunError

MODEL, FLOW = "actor_rollout_ref.model.", "actor_rollout_ref.actor.diffusion_loss.loss_mode=flow_grpo"
SOUND = (f"{MODEL}external_lib=toy_sound", f"{MODEL}algorithm=toy_sound", "algorithm.adv_estimator=flow_grpo", FLOW)
TEXT = (f"{MODEL}external_lib=toy_rollout", "actor_rollout_ref.rollout.name=toy")
LOUDNESS = """
import json, pathlib, threading

def compute_score(audio, sample_rate, prompt):
    seen = {"shape": list(audio.shape), "type": str(audio.dtype), "rate": sample_rate, "least": float(audio.min())}
    own = pathlib.Path(__file__).with_name(f"{threading.get_ident()}.json")  # several are asked at once
    own.write_text(json.dumps(seen))
    own.replace(own.with_name("seen.json"))
    return {"score": float(audio.square().mean()), "seconds": audio.shape[1] / sample_rate}
"""
BRIGHTNESS = """
def compute_score(texts, prompts):
    return [{"score": float(text[1:].split()[0]) / 255, "words": len(text.split())} for text in texts]
"""


def run(folder: Path, monkeypatch, reward: str, *more: str) -> Path:
    (folder / "reward.py").write_text(reward)
    for name in ("toy_sound.py", "toy_rollout"):
        source = ROOT / "tests/documented" / name
        shutil.copytree(source, folder / name) if source.is_dir() else shutil.copy(source, folder)
    steps = ("trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=0.01")
    run_here(settings("run", "reward.custom_reward_function.path=reward.py", *steps, *more), folder, monkeypatch)
    return folder / "run"


def samples(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_a_model_that_makes_sound(tmp_path, monkeypatch, process_group):
    done = run(tmp_path, monkeypatch, LOUDNESS, *SOUND)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["shape"][0], seen["type"], seen["rate"]) == (2, "torch.float32", 8000) and -1 <= seen["least"] < 0
    found = metrics(done)
    assert found[1]["actor/first_ratio_max_dev"] < 1e-6 and found[2]["actor/grad_norm"] > 0
    rows = samples(done / "validation/step_2")
    assert rows and all(row["kind"] == "sound" and "image" not in row for row in rows)
    for row in rows:
        with wave.open(str(done / "validation/step_2" / row["file"])) as sound:
            assert (sound.getnchannels(), sound.getframerate(), sound.getsampwidth()) == (2, 8000, 2)
            assert sound.getnframes() == seen["shape"][1]
            whole = torch.frombuffer(bytearray(sound.readframes(sound.getnframes())), dtype=torch.int16)
        assert (whole / 32767).square().mean().item() == pytest.approx(row["score"], abs=1e-3)
        assert row["reward_extra_info"]["seconds"] == seen["shape"][1] / 8000
    best = [row["file"] for row in samples(done / "training/step_2")]
    assert any(name.endswith("_best.wav") for name in best)
    played = re.findall(r'<audio controls[^>]* src="data:audio/wav;base64,([^"]+)"', (done / "report.html").read_text())
    assert (done / "validation/step_2" / rows[0]["file"]).read_bytes() in [base64.b64decode(one) for one in played]


PIPELINE = "actor_rollout_ref.rollout.pipeline"
BOTH = [f"{PIPELINE}.{one}" for one in ("height=32", "width=64", "num_frames=5", "max_sequence_length=64")]
SEEN_AND_HEARD = """
def compute_score(video, audio, sample_rate, frame_rate, image):
    assert video.shape == (5, 3, 32, 64) and len(image) == 5 and audio.shape[0] == 2
    assert abs(audio.shape[1] / sample_rate - 5 / frame_rate) < 0.1
    return {"score": float(audio.abs().mean()), "bright": float(video.mean())}
"""


def test_a_model_that_makes_videos_with_sound(tmp_path, monkeypatch, process_group):
    """Files that a player's library reads, and a page that plays them without a network."""
    av = pytest.importorskip("av")
    (tmp_path / "reward.py").write_text(SEEN_AND_HEARD)
    steps = ("trainer.total_training_steps=2", "actor_rollout_ref.actor.optim.lr=0.01")
    own = ("reward.custom_reward_function.path=reward.py", "actor_rollout_ref.rollout.algo.audio_share=0.5")
    model = tiny_checkpoint("LTX2Pipeline")
    run_here(settings("run", *steps, *own, *BOTH, model=model), tmp_path, monkeypatch)
    done = tmp_path / "run"
    found = metrics(done)
    assert found[1]["actor/first_ratio_max_dev"] < 1e-6 and found[2]["actor/grad_norm"] > 0
    rows, page = samples(done / "validation/step_2"), (done / "report.html").read_text()
    assert rows and all(row["kind"] == "video with sound" and row["file"].endswith(".mp4") for row in rows)
    for row in rows:
        content = (done / "validation/step_2" / row["file"]).read_bytes()
        with av.open(io.BytesIO(content)) as file:
            assert [stream.type for stream in file.streams] == ["video", "audio"]
            assert len(list(file.decode(video=0))) == 5
        assert base64.b64encode(content).decode() in page
    assert "<video controls" in page and 'poster="data:image/png' in page and "<polygon" in page
    again = drawn_again(done, 2)
    files = [done / "again" / f"{row['index']}.mp4" for row in again]
    asked = ["--function", "reward.py", "--json", "scores.jsonl", *map(str, files)]
    monkeypatch.setattr(sys, "argv", ["verl-omni score", *asked])
    with pytest.raises(SystemExit) as ended:
        score.main()
    assert ended.value.code == 0 and "<video controls" in (tmp_path / "scores.html").read_text()
    lines = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    # The file has the sound as a codec left it.
    told = [line["compute_score"]["score"] for line in lines]
    assert told == pytest.approx([row["score"] for row in again], rel=0.5) and min(told) > 0


@pytest.mark.parametrize("separate", [False, True])
def test_a_rollout_engine_that_makes_text(tmp_path, monkeypatch, process_group, separate):
    placed = ["actor_rollout_ref.hybrid_engine=false"] if separate else []
    done = run(tmp_path, monkeypatch, BRIGHTNESS, *TEXT, *placed)
    found = metrics(done)
    assert found[1]["actor/first_ratio_max_dev"] < 1e-6 and found[2]["actor/grad_norm"] > 0
    for row in samples(done / "validation/step_2"):
        assert row["kind"] == "text" and re.fullmatch(r"<\d+\.\d{3} bright>", row["text"])
        assert (done / "validation/step_2" / row["file"]).read_text() == row["text"]
        assert row["score"] == pytest.approx(float(row["text"][1:].split()[0]) / 255)
        shown = row["text"].replace("<", "&lt;").replace(">", "&gt;")
        assert f"<blockquote>{shown}</blockquote>" in (done / "report.html").read_text()


@pytest.mark.parametrize(
    ("reward", "more", "said"),
    [
        ("def compute_score(image):\n    return 0.0\n", SOUND, "asks for image, and what the model makes is sound"),
        ("def compute_score(audio):\n    return 0.0\n", (), "asks for audio, and what the model makes is image"),
        ("def compute_score(texts):\n    return 0.0\n", SOUND, "that has audios, sample_rates"),
    ],
)
def test_a_reward_that_asks_for_another_kind_is_refused_before_anything_starts(
    tmp_path, monkeypatch, process_group, reward, more, said
):
    with pytest.raises(RunError, match=said):
        run(tmp_path, monkeypatch, reward, *more)
    assert not (tmp_path / "run").exists()


def test_a_registered_reward_that_looks_at_pictures_is_refused_for_sound(tmp_path, monkeypatch, process_group):
    with pytest.raises(RunError, match='reward function "jpeg.*" asks for images, and what the model makes is sound'):
        run(tmp_path, monkeypatch, LOUDNESS, *SOUND, "reward.custom_reward_function.path=null",
            "reward.scorers=[{name: jpeg_compressibility}]")  # fmt: skip
