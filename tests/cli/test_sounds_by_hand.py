"""`verl-omni sample`, `score` and `eval` of a model that makes sounds."""

import json
import sys

import pytest
import torch
from tiny_models import tiny_checkpoint

from verl_omni.cli import eval as evaluate
from verl_omni.cli import sample, score
from verl_omni.rewards import make_scorer
from verl_omni.utils.responses import Sound, read_response, write_response

DRAWN = ["--prompt", "rain", "--seeds", "1", "2", "--set", "audio_duration_s=0.05", "--set", "num_inference_steps=2"]


def run(command, monkeypatch, *arguments) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["verl-omni", *map(str, arguments)])
    try:
        command.main()
    except SystemExit as ended:
        return ended.code


def test_sounds_are_drawn_and_scored_as_a_run_would(tmp_path, monkeypatch, capsys):
    """A file has 16 bits a sample; a run's reward hears what was drawn, and so does that of `eval`."""
    monkeypatch.chdir(tmp_path)
    model, scored = tiny_checkpoint("LongCatAudioDiTPipeline"), []
    code = run(sample, monkeypatch, model, *DRAWN, "--out", "drawn")
    assert code is None and capsys.readouterr().out == "Sounds: drawn\n"
    rows = [json.loads(line) for line in (tmp_path / "drawn/samples.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["file"]) for row in rows] == [("sound", "0000_seed1.wav"), ("sound", "0000_seed2.wav")]

    assert run(score, monkeypatch, "drawn", "--scorer", "loudness", "--json", "scores.jsonl") == 0
    by_hand = [json.loads(line)["loudness"]["score"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert (tmp_path / "scores.html").read_text().count("<audio controls") == 2
    assert run(score, monkeypatch, "drawn", "--scorer", "loudness", "--pairs", "pairs.jsonl").startswith(
        "error: --pairs: drawn/0000_seed1.wav is no image"
    )
    (tmp_path / "LOUD.WAV").write_bytes((tmp_path / "drawn/0000_seed1.wav").read_bytes())
    said = run(score, monkeypatch, "LOUD.WAV", "--scorer", "loudness", "--pairs", "pairs.jsonl")
    assert said.startswith("error: --pairs: LOUD.WAV is no image")

    draw_all, heard = sample.draw_all, []
    monkeypatch.setattr(sample, "draw_all", lambda *given: (drawn := draw_all(*given), heard.extend(drawn[1]))[0])
    monkeypatch.setattr(evaluate, "_page", lambda out, drawn, *rest: scored.extend(drawn[0]) or out)
    assert run(evaluate, monkeypatch, model, *DRAWN, "--scorer", "loudness") == 0
    exact = [make_scorer("loudness")(audios=[s.samples], sample_rates=[s.sample_rate])[0]["score"] for s in heard]
    assert [s.response for s in scored] == [None, None], "what was scored is let go"
    assert [s.score("loudness") for s in scored] == exact
    assert by_hand == pytest.approx(exact, rel=1e-2) and by_hand != exact


def test_a_sound_comes_back_from_its_file(tmp_path):
    sound = Sound(torch.tensor([[0.0, 0.5, -1.0], [1.0, -0.25, 0.125]]), 8000)
    back = read_response(tmp_path / write_response(sound, tmp_path / "one"))
    assert back.sample_rate == 8000 and torch.allclose(back.samples, sound.samples, atol=1 / 32767)
    (tmp_path / "cut.wav").write_bytes((tmp_path / "one.wav").read_bytes()[:20])
    with pytest.raises(ValueError, match="cut.wav cannot be read as a sound"):
        read_response(tmp_path / "cut.wav")
