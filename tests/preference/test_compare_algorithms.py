"""The comparison's settings are ones that train, and its table says what the runs logged."""

import json

import pandas as pd
import pytest
from hydra import compose, initialize_config_module
from tiny_models import tiny_checkpoint

from benchmarks.compare_algorithms import ALGORITHMS, curve, settings, table
from verl_omni.algorithms.registry import get_algorithm
from verl_omni.config import schema
from verl_omni.trainer.checks.preflight import preflight


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_may_train_the_quickstart(name, tmp_path):
    row = {"data_source": "ocr", "prompt": 'a sign "1"', "reward_model": {"style": "rule", "ground_truth": "1"}}
    pd.DataFrame([row] * 6).to_parquet(tmp_path / "prompts.parquet")
    given = [
        "hydra.searchpath=[pkg://verl_omni.trainer.config]",
        f"actor_rollout_ref.model.path={tiny_checkpoint()}",
        f"data.train_files={tmp_path / 'prompts.parquet'}",
        f"trainer.default_local_dir={tmp_path}",
    ]
    schema.register()
    with initialize_config_module("verl_omni.quickstart", version_base=None):
        config = preflight(compose("quickstart", [*given, *settings(name, 3, 40)]))
    algorithm = name.split()[0]
    assert config.actor_rollout_ref.model.algorithm == algorithm
    assert (config.trainer.seed, config.actor_rollout_ref.rollout.seed, config.trainer.test_freq) == (3, 3, 20)
    assert (config.actor_rollout_ref.rollout.algo.noise_level == 0) == (
        get_algorithm(algorithm).trainer_type == "direct_preference"
    )


def test_the_table_counts_images_and_seconds(tmp_path):
    curves = []
    for seed, last in enumerate((0.8, 0.9)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        step = {"perf/total_num_images": 96, "timing_s/step": 2.0}
        rows = [(0, {"val-core/ocr/reward/mean@1": 0.5}), (1, step), (2, step | {"val-core/ocr/reward/mean@1": last})]
        lines = [json.dumps({"step": n, "data": data}) for n, data in rows]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        curves.append(curve(folder))
    assert curves[0] == {0: (0.5, 0, 0.0), 2: (0.8, 192, 4.0)}
    assert table({"awm": curves}).splitlines() == [
        "| algorithm | 0 images | 192 images |",
        "|---|---|---|",
        "| `awm` | 0.500 | 0.850 (0.800 to 0.900), 4 s |",
    ]
