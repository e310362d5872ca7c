"""Two runs are the same when every metric but the clock's is, and the weights are."""

import json
import types

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import same_numbers
from benchmarks.same_numbers import additions, differences


def write_run(folder, loss=0.1, seconds=1.0, weight=1.0, **more):
    export = folder / "global_step_1" / "export"
    export.mkdir(parents=True)
    data = {"actor/loss": loss, "timing_s/step": seconds, "perf/throughput": seconds, **more}
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    save_file({"w": np.full(2, weight, np.float32)}, export / "model.safetensors")


def test_only_the_clock_may_differ(tmp_path):
    write_run(tmp_path / "before/flow_grpo")
    write_run(tmp_path / "after/flow_grpo", seconds=2.0)
    assert differences(tmp_path / "before", tmp_path / "after") == {"flow_grpo": []}


@pytest.mark.parametrize(
    "change", [{"loss": float(np.nextafter(0.1, 1))}, {"weight": np.nextafter(np.float32(1), 2)}]
)
def test_the_last_bit_counts(tmp_path, change):
    write_run(tmp_path / "before/flow_grpo")
    write_run(tmp_path / "after/flow_grpo", **change)
    assert len(differences(tmp_path / "before", tmp_path / "after")["flow_grpo"]) == 1


def test_a_metric_may_be_added_and_none_may_go(tmp_path):
    write_run(tmp_path / "before/flow_grpo")
    write_run(tmp_path / "after/flow_grpo", **{"actor/new": 1.0})
    assert differences(tmp_path / "before", tmp_path / "after") == {"flow_grpo": []}
    assert additions(tmp_path / "before", tmp_path / "after") == ["actor/new"]
    assert len(differences(tmp_path / "after", tmp_path / "before")["flow_grpo"]) == 1


def test_a_run_of_one_side_differs(tmp_path):
    write_run(tmp_path / "before/dpo")
    assert differences(tmp_path / "before", tmp_path / "after")["dpo"]


def without_export(run):
    next(run.glob("global_step_1/export/*")).unlink()


def without_steps(run):
    (run / "metrics.jsonl").write_text("")


@pytest.mark.parametrize("half", ["before", "after"])
@pytest.mark.parametrize("take", [without_export, without_steps])
def test_half_a_run_is_the_same_as_nothing(tmp_path, take, half):
    write_run(tmp_path / "before/dpo")
    write_run(tmp_path / "after/dpo")
    take(tmp_path / half / "dpo")
    found = differences(tmp_path / "before", tmp_path / "after")["dpo"]
    assert len(found) == 1 and str(tmp_path / half / "dpo") in found[0]


def test_nor_are_two_halves_of_a_run(tmp_path):
    for side in ("before", "after"):
        write_run(tmp_path / side / "dpo")
        without_export(tmp_path / side / "dpo")
    assert len(differences(tmp_path / "before", tmp_path / "after")["dpo"]) == 2


def test_nor_are_two_that_failed(tmp_path):
    for side in ("before", "after"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "dpo.settings").write_text("")
    assert len(differences(tmp_path / "before", tmp_path / "after")["dpo"]) == 2


@pytest.mark.parametrize("longer", ["before", "after"])
def test_a_step_more_on_either_side_differs(tmp_path, longer):
    write_run(tmp_path / "before/dpo")
    write_run(tmp_path / "after/dpo")
    with (tmp_path / longer / "dpo/metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "data": {"actor/loss": 0.1}}) + "\n")
    assert len(differences(tmp_path / "before", tmp_path / "after")["dpo"]) == 1


@pytest.mark.parametrize("more", ["before", "after"])
def test_a_file_of_weights_more_on_either_side_differs(tmp_path, more):
    write_run(tmp_path / "before/dpo")
    write_run(tmp_path / "after/dpo")
    save_file({"w": np.zeros(1)}, tmp_path / more / "dpo/global_step_1/export/other.safetensors")
    assert len(differences(tmp_path / "before", tmp_path / "after")["dpo"]) == 1


def test_a_metric_that_an_earlier_step_lacked_differs(tmp_path):
    for side in ("before", "after"):
        write_run(tmp_path / side / "dpo", **{"actor/seldom": 1.0})
        with (tmp_path / side / "dpo/metrics.jsonl").open("a") as file:
            data = {"actor/loss": 0.1} | ({"actor/seldom": 1.0} if side == "after" else {})
            file.write(json.dumps({"step": 2, "data": data}) + "\n")
    assert len(differences(tmp_path / "before", tmp_path / "after")["dpo"]) == 1


def test_a_folder_of_other_settings_is_no_run_of_these(tmp_path, monkeypatch):
    started = []

    def trained(command, **_):
        started.append(command)
        write_run(tmp_path / "out/dpo_separate")
        return types.SimpleNamespace(returncode=0)

    monkeypatch.setattr(same_numbers.subprocess, "run", trained)
    ask = ["same_numbers", "run", str(tmp_path / "out"), "--only", "dpo", "--modes", "separate", "--set"]
    for value in ("false", "false", "true"):
        monkeypatch.setattr("sys.argv", [*ask, f"trainer.val_before_train={value}"])
        if value == "true":
            with pytest.raises(SystemExit, match="holds a run of other settings"):
                same_numbers.main()
        else:
            same_numbers.main()
    assert len(started) == 1
    assert {"actor_rollout_ref.hybrid_engine=false", "trainer.val_before_train=false"} <= set(started[0])
