"""From the stage times of one run to those of others: closed formulas, and one command."""

import dataclasses
import json
import subprocess
import sys

import pytest

from verl_omni.perf.plan import Work, read_work, table


def write_run(
    folder, mode="colocated", training=1, rollout=None, drawing=6.0, learning=2.0, steps=5, handover=0.0, in_turn=False
):
    """A run whose stages took so long; its first steps took far longer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "trainer": {"mode": mode, "n_gpus_per_node": training, "nnodes": 1, "max_staleness": 0 if in_turn else None},
        "actor_rollout_ref": {"rollout": {"n_gpus_per_node": rollout, "nnodes": None}},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    lines = []
    for step in range(1, steps + 1):
        slow = 50.0 if step <= 2 else 0.0
        wait = max(0.0, drawing - learning) if mode in ("one_step_off", "fully_async") and not in_turn else drawing
        wait += handover
        data = {"timing_s/step": learning + wait + slow, "timing_s/gen": wait, "timing_s/gen_images": drawing}
        lines.append(json.dumps({"step": step, "data": data}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.parametrize(
    ("mode", "training", "rollout", "drawing", "learning"),
    [
        ("colocated", 4, None, 3.0, 1.0),
        ("separate", 2, 3, 4.0, 2.0),
        ("one_step_off", 1, 4, 3.0, 4.0),
        ("fully_async", 1, 4, 3.0, 4.0),
    ],
)
def test_work_is_seconds_times_devices_in_every_mode(tmp_path, mode, training, rollout, drawing, learning):
    """The same work, shared out in four ways: 12 device-seconds of drawing and 4 of learning."""
    work = read_work(write_run(tmp_path / "run", mode, training, rollout, drawing, learning))
    assert (work.drawing, work.learning) == (12, 4)
    assert work.predict("colocated", 8, 0) == 2
    assert work.predict("separate", 2, 6) == 4
    assert work.predict("one_step_off", 2, 6) == 2 and work.predict("one_step_off", 4, 4) == 3
    assert work.predict("fully_async", 2, 6) == 2 and work.predict("fully_async", 4, 4) == 3
    assert work.predict(mode, training, rollout or 0) == pytest.approx(work.step)


def test_a_run_with_teachers_on_devices_of_their_own_is_refused(tmp_path):
    folder = write_run(tmp_path / "run")
    config = json.loads((folder / "config.yaml").read_text())
    config["actor_rollout_ref"]["actor"] = {"teacher": {"n_gpus_per_node": 1}}
    (folder / "config.yaml").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has teachers on devices of their own"):
        read_work(folder)


def test_rewards_that_training_waits_for_cost_nothing_where_it_does_not_wait():
    """2 s of drawing, 3 s of learning, and in between 1 s or 7 s for rewards, whatever the number of devices."""
    modes = ("separate", "one_step_off", "fully_async")
    work = Work(drawing=2, learning=6, mode="separate", training=2, rollout=1, step=6, scoring=1)
    assert [work.predict(mode, 2, 1) for mode in modes] == [6, 3, 3]
    late = dataclasses.replace(work, scoring=7)
    assert [late.predict(mode, 2, 1) for mode in modes] == [12, 6, 4] and late.predict("colocated", 4, 0) == 9


@pytest.mark.parametrize("mode", ["separate", "one_step_off"])
def test_late_rewards_as_measured(tmp_path, mode):
    """The runs of docs/async.md with rewards after 4 s. One step off waits for what is left of them."""
    measured = {
        "separate": {"step": 9.22, "gen": 2.83, "gen_images": 2.65, "reward": 3.99},
        "one_step_off": {"step": 4.79, "gen": 0.14, "gen_images": 2.66, "reward": 2.10},
    }
    folder = write_run(tmp_path / "run", mode, 1, 1)
    row = json.dumps({"step": 1, "data": {f"timing_s/{name}": value for name, value in measured[mode].items()}})
    (folder / "metrics.jsonl").write_text(f"{row}\n" * 3)
    work = read_work(folder)
    assert work.scoring == pytest.approx(4, rel=0.06)
    for other, stages in measured.items():
        assert work.predict(other, 1, 1) == pytest.approx(stages["step"], rel=0.05), other


def test_in_turn_nothing_overlaps(tmp_path):
    folder = write_run(tmp_path / "run", "fully_async", 1, 1, handover=0.5, in_turn=True)
    work = read_work(folder)
    assert (work.drawing, work.learning, work.handover) == (6, 2, 0.5)
    assert work.predict("separate", 1, 1) == work.step == 8.5


@pytest.mark.parametrize("mode", ["separate", "one_step_off"])
def test_weights_and_samples_take_their_time_whatever_the_number_of_devices(tmp_path, mode):
    """Half a second of a step, measured where one side waits for the other: drawing takes 6 s, learning 2 s."""
    work = read_work(write_run(tmp_path / "run", mode, 1, 1, handover=0.5))
    assert (work.drawing, work.learning, work.handover) == (6, 2, 0.5)
    assert work.predict("separate", 1, 3) == 4.5 and work.predict("one_step_off", 1, 3) == 2.5
    assert work.predict("fully_async", 1, 3) == 2.5 and work.predict("fully_async", 1, 6) == 2.5
    assert work.predict("colocated", 4, 0) == 2


# Medians of runs with one training process and one or two servers, each process on a core of its own (docs/async.md).
MEASURED = {
    ("separate", 1): 3.62, ("one_step_off", 1): 2.01, ("fully_async", 1): 2.03,
    ("separate", 2): 3.09, ("one_step_off", 2): 2.17, ("fully_async", 2): 1.90,
}  # fmt: skip


def test_measured_runs_are_predicted_within_fifteen_percent():
    measured = Work(drawing=1.74, learning=1.72, mode="separate", training=1, rollout=1, step=3.62, handover=0.14)
    for (mode, servers), step in MEASURED.items():
        assert measured.predict(mode, 1, servers) == pytest.approx(step, rel=0.15), (mode, servers)


def test_the_best_split_is_marked():
    text = table(Work(drawing=12, learning=4, mode="colocated", training=1, rollout=0, step=16), 4)
    assert text.count("**") == 6  # all four in turn, and one that trains beside three that draw, take equally long
    assert "| colocated | 4 | – | **4.00** |" in text and "| one_step_off | 1 | 3 | **4.00** |" in text
    assert "| one_step_off | 3 | 1 | 12.00 |" in text and "| separate | 2 | 2 | 8.00 |" in text


def command(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "verl_omni.cli.main", *arguments], capture_output=True, text=True)


def test_the_command(tmp_path):
    done = command("plan", str(write_run(tmp_path / "run")), "--devices", "2")
    assert done.returncode == 0 and "| one_step_off | 1 | 1 | 6.00 |" in done.stdout, done.stderr
    done = command("plan", str(tmp_path / "nothing"))
    assert done.returncode != 0
    assert done.stderr == f"error: {tmp_path}/nothing is no run folder: it has no metrics.jsonl\n"
    short = write_run(tmp_path / "short", steps=2)
    assert "3 or more are needed" in command("plan", str(short)).stderr


def test_a_line_that_is_half_written_is_not_counted(tmp_path):
    whole = read_work(write_run(tmp_path))
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 6, "da')
    assert read_work(tmp_path) == whole
