"""Two runs are the same when every metric but the clock's is, and the weights are."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

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
