"""Ranks that share their rows train as one: an engine outside the package, and ours, which shares the tokens too."""

import shutil
from pathlib import Path

import pytest
from e2e_runs import ROOT, QuickRun, metrics, settings

pytestmark = pytest.mark.timeout(1500)

# Adam would make much of the last bits of small gradients.
OPTIM = ["actor_rollout_ref.actor.optim.optimizer=SGD", "actor_rollout_ref.actor.optim.lr=0.01"]
SETTINGS = ["trainer.total_training_steps=2", "data.val_files=null", *OPTIM]
# A forward of as many rows in rollout and training: with others, matrix products round the last bit differently.
ALIKE = ["actor_rollout_ref.rollout.max_num_seqs=1", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
COUNTED = ("critic/rewards/mean", "actor/grad_norm", "actor/loss", "actor/ratio_max_dev")


def run(folder: Path, *more: str) -> dict[int, dict[str, float]]:
    process = QuickRun(settings("run", *SETTINGS, *more), folder)
    assert process.wait() == 0, process.output()[-4000:]
    return metrics(folder / "run")


def place(folder: Path) -> Path:
    folder.mkdir()
    shutil.copytree(ROOT / "tests/documented/toy_engine", folder / "toy_engine")
    return folder


def assert_alike(one: dict[int, dict[str, float]], two: dict[int, dict[str, float]]) -> None:
    assert list(one) == list(two) == [1, 2]
    for step in one:
        for name in COUNTED:
            # The loss is a small difference of large terms.
            expected = pytest.approx(one[step][name], rel=1e-4, abs=1e-4 if name == "actor/loss" else 1e-6)
            assert two[step][name] == expected, (step, name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), *ALIKE)


def test_ranks_of_an_engine_outside_the_package(alone, tmp_path):
    toy = ["actor_rollout_ref.model.external_lib=toy_engine", "actor_rollout_ref.actor.strategy=toy"]
    two = run(place(tmp_path / "shared"), *toy, *ALIKE, "trainer.n_gpus_per_node=2")
    assert_alike(alone, two)
    assert two[1]["actor/first_ratio_max_dev"] == 0


@pytest.mark.slow  # workers/test_sequence_parallel.py has the engine's ranks without a run around them
@pytest.mark.parametrize("drawn", ["share_samples=false", "share_samples=true"])
def test_ranks_that_share_the_tokens_too(alone, drawn, tmp_path):
    ulysses = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"
    two = run(tmp_path, *ALIKE, ulysses, "trainer.n_gpus_per_node=2", f"actor_rollout_ref.rollout.{drawn}")
    assert_alike(alone, two)
    # Attention over shares of the tokens rounds differently: training compares with log-probabilities of its own.
    assert two[1]["actor/first_ratio_max_dev"] == 0.0 and two[1]["actor/old_log_probs_from_train"] == 1.0
