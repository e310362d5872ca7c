import io
import json
import math
import os
import sys
import time
import wave
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence

from verl_omni.report import tracker_notices, tracker_pictures
from verl_omni.report.notices import notice
from verl_omni.report.tracking import AddedLines, Console, JsonLines, Tracking, read_metrics
from verl_omni.utils.errors import RunError
from verl_omni.utils.responses import Sound, VideoWithSound, write_response


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def track(run_dir, *backends, **kwargs):
    return Tracking(list(backends), run_dir, "project", "experiment", {"trainer": {}}, **kwargs)


def test_each_step_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    tracking = track(tmp_path / "run", "jsonl")
    file = tmp_path / "run" / "metrics.jsonl"
    for step in range(3):
        tracking.log({"a/x": torch.tensor(0.5), "b": np.float32(0.25), "n": step}, step)
        assert lines(file)[-1] == {"step": step, "data": {"a/x": 0.5, "b": 0.25, "n": step}}
    assert [entry["step"] for entry in lines(file)] == [0, 1, 2]
    tracking.finish()


def test_floats_survive_exactly_and_non_finite_ones_are_null(tmp_path):
    log = JsonLines(tmp_path / "m.jsonl")
    log.log({"third": 1 / 3, "tiny": 5e-324, "nan": math.nan, "inf": -math.inf}, 1)
    entry = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=pytest.fail)
    assert entry["data"] == {"third": 1 / 3, "tiny": 5e-324, "nan": None, "inf": None}


def test_resuming_cuts_off_what_lies_beyond_the_checkpoint(tmp_path):
    path = tmp_path / "m.jsonl"
    whole = JsonLines(tmp_path / "whole.jsonl")
    first = JsonLines(path)
    for step in range(6):
        whole.log({"x": step / 7}, step)
        first.log({"x": step / 7}, step)
    with path.open("a") as file:
        file.write('{"step": 6, "da')  # killed while writing

    second = JsonLines(path, resumed_step=3)
    assert [entry["step"] for entry in lines(path)] == [0, 1, 2, 3]
    for step in (4, 5):
        second.log({"x": step / 7}, step)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_step_logged_again_is_one_line_with_both(tmp_path, resumed):
    path = tmp_path / "m.jsonl"
    log = JsonLines(path)
    log.log({"x": 1}, 1)
    log.log({"x": 22222222, "y": 2}, 2)
    if resumed:
        log.finish()
        log = JsonLines(path, resumed_step=2)
    log.log({"val": 0.5, "x": 3}, 2)
    log.log({"x": 4}, 3)
    expected = [{"step": 1, "data": {"x": 1}}, {"step": 2, "data": {"x": 3, "y": 2, "val": 0.5}}]
    assert lines(path) == [*expected, {"step": 3, "data": {"x": 4}}]
    with pytest.raises(ValueError, match="step 2 logged after step 3"):
        log.log({"x": 0}, 2)


def test_a_validation_adds_to_its_step_and_takes_nothing_away(tmp_path):
    """Of a checkpoint in the middle of a run, where going on would cut off the rest."""
    path = tmp_path / "m.jsonl"
    log = JsonLines(path)
    for step in (1, 2, 3):
        log.log({"x": step}, step)
    for step in (2, 0):
        AddedLines(path).log({"val": 0.5}, step)
    expected = [{"step": 0, "data": {"val": 0.5}}, {"step": 1, "data": {"x": 1}}]
    assert lines(path) == [*expected, {"step": 2, "data": {"x": 2, "val": 0.5}}, {"step": 3, "data": {"x": 3}}]


def test_a_run_from_the_start_keeps_the_older_file(tmp_path):
    JsonLines(tmp_path / "metrics.jsonl").log({"x": 1}, 1)
    JsonLines(tmp_path / "metrics.jsonl").log({"x": 2}, 0)
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 0, "data": {"x": 2}}]
    assert lines(tmp_path / "metrics.old.jsonl") == [{"step": 1, "data": {"x": 1}}]


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text("{}x\n")
    with pytest.raises(ValueError, match="m.jsonl is damaged"):
        read_metrics(tmp_path / "m.jsonl")


def test_console_shows_what_matters_on_one_line(tmp_path, capsys):
    tracking = track(tmp_path, "console", total_steps=100)
    data = {
        "actor/kl_loss": 0.0012,
        "critic/rewards/mean": np.float64(0.7342),
        "actor/pg_clipfrac": 0.031,
        "perf/time_per_step": 4.21,
        "timing_s/old_log_prob": 1.0,
    }
    tracking.log(data, 12)
    tracking.log({"val-core/ocr/mean": 0.8125}, 20)
    assert capsys.readouterr().out.splitlines() == [
        "step 12/100 | reward 0.734 | kl 1.20e-03 | clipped 3.1% | time 4.2 s",
        "step 20/100 | val ocr/mean 0.812",
    ]
    tracking.log({"critic/rewards/mean": 0.000123456, "critic/rewards/std_mean": 2e-9, "val-core/a": -0.04}, 21)
    assert capsys.readouterr().out == "step 21/100 | val a -0.04 | reward 0.000123 | group std 2e-09\n"
    assert Console().line({}, 3) == "step 3"


def test_console_of_pairs_and_of_a_validation_that_partly_failed():
    offline = {"actor/implicit_accuracy": 0.75, "actor/implicit_margin": 0.31, "actor/grad_norm": 0.5}
    assert Console().line(offline, 3) == "step 3 | chosen preferred 75% | margin 0.310 | grad norm 0.5"
    partly = {"val-core/ocr/reward/mean@1": 0.5, "val-aux/ocr/failed": 2.0}
    assert Console().line(partly, 3) == "step 3 | val ocr/reward/mean@1 0.500 | val ocr 2 scores failed"


def test_unknown_backend_gets_the_nearest_name_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match='unknown trainer.logger "wandbb": did you mean "wandb"\\? known: .*jsonl'):
        track(tmp_path / "run", "jsonl", "wandbb")
    assert not (tmp_path / "run").exists()


def test_tensorboard_writes_below_the_run_and_leaves_the_environment_alone(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    tracking = track(tmp_path, "tensorboard", "jsonl")
    assert "TENSORBOARD_DIR" not in os.environ
    for step in (1, 2):
        tracking.log({"critic/rewards/mean": torch.tensor(step / 4)}, step)
    tracking.finish()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("critic/rewards/mean")] == [(1, 0.25), (2, 0.5)]

    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "mine"))
    track(tmp_path, "tensorboard").finish()
    assert any((tmp_path / "mine").iterdir())


def test_wandb_offline_writes_below_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    tracking = track(tmp_path, "wandb")
    tracking.log({"critic/rewards/mean": 0.5}, 1)
    tracking.finish()
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    until = time.monotonic() + 60  # W&B's own process may write it after `finish` has returned
    while b"critic/rewards/mean" not in files[0].read_bytes():
        assert time.monotonic() < until
        time.sleep(0.1)


# ---- images and videos -------------------------------------------------------------------------------------


@pytest.fixture
def drawn(tmp_path):
    """A run's folder with the images of a validated step, and a video: {name: what is in the file}."""
    folder = tmp_path / "run/validation/step_1"
    folder.mkdir(parents=True)
    frames = [Image.new("RGB", (16, 8), colour) for colour in ("red", "green", "blue")]
    frames[0].save(folder / "00000.png")
    frames[1].save(folder / "00001.gif", save_all=True, append_images=frames[1:])
    rows = [
        {"index": i, "prompt": f"prompt {i}", "score": score, "image": name, "reward_extra_info": {}}
        for i, (name, score) in enumerate({"00000.png": 0.5, "00001.gif": None}.items())
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: (folder / name).read_bytes() for name in ("00000.png", "00001.gif")}


def logged_twice(run_dir, backend):
    """As a step that was validated and then saved: its images are sent once."""
    tracking = track(run_dir, backend)
    tracking.log({"val-core/a/reward/mean@1": 0.5}, 1)
    tracking.log({"timing_s/save_checkpoint": 0.5}, 1)
    tracking.finish()


def test_tensorboard_has_the_images_and_videos(tmp_path, drawn, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    logged_twice(tmp_path / "run", "tensorboard")
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    for name, content in drawn.items():
        (image,) = events.Images(f"images/validation/{name[:5]}")
        assert (image.step, image.width, image.height, image.encoded_image_string) == (1, 16, 8, content)
    (words,) = events.Tensors("images/validation/00001/text_summary")
    assert words.tensor_proto.string_val[0] == b"its reward failed: prompt 1"


def test_wandb_has_the_images_and_videos(tmp_path, drawn, monkeypatch):
    import wandb

    wandb.teardown()  # of earlier tests: it reads its environment once
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    logged_twice(tmp_path / "run", "wandb")
    files = [path for path in tmp_path.glob("run/wandb/offline-run-*/files/media/**/*") if path.is_file()]
    assert sorted(path.suffix for path in files) == [".gif", ".png"]
    assert {path.read_bytes() for path in files} == set(drawn.values())


@pytest.fixture
def heard(tmp_path):
    """The same of a sound, a video with sound and a text."""
    folder = tmp_path / "run/validation/step_1"
    folder.mkdir(parents=True)
    pytest.importorskip("av")
    grey = (torch.arange(5)[:, None, None, None] * 50).expand(5, 3, 8, 16).to(torch.uint8)
    tone = Sound(torch.sin(torch.arange(5000) * 0.25)[None] / 2, 8000)
    ramp = Sound(torch.linspace(-1, 1, 80).expand(2, -1), 8000)
    responses = {"sound": ramp, "video with sound": VideoWithSound(grey, tone, 8.0), "text": "words"}
    rows = []
    for i, (kind, one) in enumerate([*responses.items(), *responses.items()]):
        file = write_response(one, folder / f"0000{i}")
        rows.append({"index": i, "prompt": f"prompt {i}", "score": 0.5, "kind": kind, "file": file})
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {row["file"]: (folder / row["file"]).read_bytes() for row in rows if row["kind"] != "text"}


def test_tensorboard_plays_sounds(tmp_path, heard, monkeypatch, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    logged_twice(tmp_path / "run", "tensorboard")
    assert "did not take" not in capsys.readouterr().out
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    (sound,) = events.Audio("sounds/validation/00000")
    assert (sound.step, sound.sample_rate, sound.length_frames) == (1, 8000, 80)
    assert sound.encoded_audio_string == heard["00000.wav"]
    (video,) = events.Images("images/validation/00001")  # which has no place for an mp4 file
    with Image.open(io.BytesIO(video.encoded_image_string)) as moving:
        shown = [frame.convert("L").getpixel((3, 3)) for frame in ImageSequence.Iterator(moving)]
        assert moving.format == "GIF" and moving.info["duration"] == 120  # an eighth of a second, in whole hundredths
    assert shown == pytest.approx([0, 50, 100, 150, 200], abs=6)
    (beside,) = events.Audio("sounds/validation/00001")
    with wave.open(io.BytesIO(beside.encoded_audio_string)) as file:
        wave_form = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32767
        assert file.getnframes() / file.getframerate() == pytest.approx(5 / 8, abs=0.05)
        assert (beside.sample_rate, beside.length_frames) == (file.getframerate(), file.getnframes())
    heard_hertz = np.abs(np.fft.rfft(wave_form)).argmax() * beside.sample_rate / len(wave_form)
    assert heard_hertz == pytest.approx(0.25 * 8000 / (2 * math.pi), abs=2)


def test_wandb_has_sounds_and_videos_with_sound(tmp_path, heard, monkeypatch, capsys):
    import wandb

    wandb.teardown()  # of earlier tests: it reads its environment once
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    tracking = track(tmp_path / "run", "wandb")
    for step in (1, 2):  # a step is taken as whole when another begins
        tracking.log({"val-core/a/reward/mean@1": 0.5}, step)
    shown = {key: wandb.run.summary[key] for key in wandb.run.summary.keys() if "validation" in key}
    files = Path(wandb.run.dir)
    tracking.finish()
    assert "did not take" not in capsys.readouterr().out
    for name in ("00000.wav", "00003.wav"):
        sound = shown.pop(f"sounds/validation/{name[:5]}")
        assert (sound["_type"], sound["caption"]) == ("audio-file", f"0.500: prompt {int(name[:5])}")
        assert (files / sound["path"]).read_bytes() == heard[name]
    ((panel, videos),) = shown.items()
    assert (panel, videos["_type"], videos["captions"]) == (
        "videos/validation", "videos", ["0.500: prompt 1", "0.500: prompt 4"]
    )  # fmt: skip
    assert [(files / one["path"]).read_bytes() for one in videos["videos"]] == [heard["00001.mp4"], heard["00004.mp4"]]


def test_mlflow_has_the_images_and_videos(tmp_path, drawn, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    logged_twice(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'run/mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert run.data.metrics["val-core/a/reward/mean_at_1"] == 0.5
    files = [path for path in (tmp_path / "run/mlflow").rglob("*") if path.is_file()]
    (image,) = (path for path in files if path.suffix == ".png")
    assert Image.open(image).convert("RGB").getpixel((3, 3)) == (255, 0, 0)
    (video,) = (path for path in files if path.suffix == ".gif")
    assert video.read_bytes() == drawn["00001.gif"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "all of it is in the run's folder"


def own_trackio_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.utils.MEDIA_DIR", tmp_path / "trackio/media")
    for module in [module for name, module in sys.modules.items() if name.startswith("trackio")]:
        for name in ("TRACKIO_DIR", "MEDIA_DIR"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, tmp_path / "trackio" / ("media" if name == "MEDIA_DIR" else ""))


def test_trackio_has_the_images_and_videos(tmp_path, drawn, monkeypatch):
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    own_trackio_folder(tmp_path, monkeypatch)
    logged_twice(tmp_path / "run", "trackio")
    assert trackio.context_vars.current_run.get() is None
    files = [path for path in (tmp_path / "trackio").rglob("*") if path.suffix in (".png", ".gif")]
    assert {path.read_bytes() for path in files} == set(drawn.values())


def test_a_tracker_that_takes_no_images_ends_no_run(tmp_path, drawn, monkeypatch, capsys):
    def broken(*_):
        raise ConnectionError("no way there")

    monkeypatch.setitem(tracker_pictures.SENDERS, "tensorboard", broken)
    logged_twice(tmp_path / "run", "tensorboard")
    said = "step 1: tensorboard did not take the images: ConnectionError: no way there"
    assert capsys.readouterr().out.splitlines().count(said) == 1


def test_mlflow_that_cannot_start_is_said(tmp_path, monkeypatch):
    """verl goes on without it after three tries: nobody would know."""
    monkeypatch.setattr("verl.utils.tracking.Tracking.__init__", lambda tracking, *_: setattr(tracking, "logger", {}))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:9")
    with pytest.raises(RunError, match="trainer.logger has mlflow, which could not be started"):
        track(tmp_path, "mlflow")


# ---- warnings ----------------------------------------------------------------------------------------------

ALIKE = "the images of each prompt become alike (critic/diversity 0.2 at first, now 0.09): look at them"


def warned(run_dir, backend):
    """A resumed run: what was said before it is not said again, and what is said after its last line is sent too."""
    run_dir.mkdir(exist_ok=True)
    notice(run_dir, "said before", 1)
    tracking = track(run_dir, backend)
    notice(run_dir, ALIKE, 2)
    tracking.log({"critic/rewards/mean": 0.5}, 2)
    tracking.log({"critic/rewards/mean": 0.5}, 3)
    notice(run_dir, "training waits for samples")
    tracking.finish()


SENT = [
    ("the images of each prompt become alike (critic/diversity ...", f"step 2: {ALIKE}"),
    ("training waits for samples", "training waits for samples"),
]


def test_wandb_has_the_warnings_as_alerts(tmp_path, monkeypatch):
    import wandb
    from wandb.sdk.interface.interface import InterfaceBase

    wandb.teardown()  # of earlier tests: it reads its environment once
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    sent, publish = [], InterfaceBase.publish_alert
    monkeypatch.setattr(
        InterfaceBase, "publish_alert", lambda self, *alert: (sent.append(alert[:3]), publish(self, *alert))
    )
    warned(tmp_path / "run", "wandb")
    assert sent == [(title, line, "WARN") for title, line in SENT]
    assert all(len(title) < 64 for title, _ in SENT), "W&B's limit"


def test_trackio_has_the_warnings_as_alerts(tmp_path, monkeypatch):
    trackio = pytest.importorskip("trackio", reason="trackio is not installed")
    own_trackio_folder(tmp_path, monkeypatch)
    warned(tmp_path / "run", "trackio")
    alerts = trackio.Api().alerts("project")
    assert sorted((one["step"], one["title"], one["text"], one["level"]) for one in alerts) == [
        (2, *SENT[0], "warn"), (3, *SENT[1], "warn")
    ]  # fmt: skip


def test_a_tracker_that_takes_no_warning_ends_no_run(tmp_path, monkeypatch, capsys):
    def broken(*_):
        raise ConnectionError("no way there")

    monkeypatch.setitem(tracker_notices.SENDERS, "tensorboard", broken)
    warned(tmp_path / "run", "tensorboard")
    said = "tensorboard did not take a warning: ConnectionError: no way there"
    assert capsys.readouterr().out.splitlines().count(said) == len(SENT)


def test_half_a_line_waits_for_its_end(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setitem(tracker_notices.SENDERS, "mine", lambda _, title, line: taken.append(line))
    notices = tracker_notices.TrackerNotices(tmp_path, {"mine": None})
    notices.send()
    with (tmp_path / "notices.jsonl").open("a") as file:
        for part, there in (('{"step": null, "li', []), ('ne": "a"}\n', ["a"]), ('{"line": "b"}\n', ["a", "b"])):
            file.write(part)
            file.flush()
            notices.send()
            assert taken == there
