"""Seeds of different runs, steps and purposes have nothing in common."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from verl.protocol import DataProto

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.data.prompt_loader import EpochStream
from verl_omni.trainer.callbacks import Run
from verl_omni.trainer.diffusion.policy_gradient_trainer import PolicyGradientRayTrainer
from verl_omni.utils.seeds import derive_seed, derive_seeds
from verl_omni.workers.layout import Layout


def trainer(seed: int, step: int) -> PolicyGradientRayTrainer:
    """As far as it draws anything, without workers."""
    made = object.__new__(PolicyGradientRayTrainer)
    made.settings = made.config = DiffusionTrainerConfig()
    rollout = made.settings.actor_rollout_ref.rollout
    rollout.seed = made.settings.trainer.seed = seed
    made.run_dir, made.total_steps = Path("run"), 1
    rollout.n, rollout.algo.same_initial_noise = 4, True
    made.settings.actor_rollout_ref.actor.shuffle = True
    made.layout, made.run = Layout(), Run(made.config, made.run_dir, 1, step)
    return made


def rollout_seeds(seed: int, step: int) -> list[int]:
    prompts = DataProto.from_single_dict({"prompt": np.array(["a", "b"], dtype=object)})
    batch = trainer(seed, step)._training_requests(prompts, {}, step).non_tensor_batch
    assert len(set(batch["init_seed"][:4])) == 1 and len(set(batch["init_seed"])) == 2
    return [*batch["seed"], *set(batch["init_seed"])]


def test_no_rollout_takes_the_noise_of_another_seed_or_step():
    """Seed 0 at step 1000 once was seed 1 at step 0."""
    steps = (0, 1, 999, 1000, 1001, 2000, 4294, 4295, 10**6)
    runs = {(seed, step): rollout_seeds(seed, step) for seed in (0, 1, 2, 5, 10**6, 2**32, 2**40) for step in steps}
    drawn = list(itertools.chain.from_iterable(runs.values()))
    assert len(set(drawn)) == len(drawn)
    assert len({seed % 2**32 for seed in drawn}) == len(drawn)  # torch's CPU generator looks at 32 bits
    assert rollout_seeds(1, 0) == runs[1, 0]


@pytest.mark.parametrize("purpose", ["mini-batches", "trained steps", "noise levels"])
def test_step_one_of_a_seed_is_not_step_zero_of_the_next(purpose):
    drawn = [trainer(seed, step)._seed(purpose) for seed in range(30) for step in range(30)]
    assert len(set(drawn)) == len(drawn)


def test_purposes_share_no_stream():
    names = ["mini-batches", "trained steps", "noise levels", "rollout", "initial noise", "sde window"]
    assert len({derive_seed(0, name, 0) for name in names}) == len(names)


def test_two_runs_with_neighbouring_seeds_shuffle_differently_at_every_step():
    one, other = ([trainer(seed, step)._training_order(80, 4, step).tolist() for step in range(20)] for seed in (0, 1))
    assert not any(order in one for order in other)


def test_any_seed_that_is_not_negative_is_one_of_its_own():
    huge = [0, 1, 2**31, 2**32, 2**63, 2**64, 2**64 + 1, 2**100]
    orders = [next(iter(EpochStream(40, 40, True, seed))) for seed in huge]
    assert len({tuple(order) for order in orders}) == len(huge)
    assert len({derive_seed(seed, "x") for seed in huge}) == len(huge)
    assert all(0 <= derive_seed(seed, "x") < 2**63 for seed in huge)


def test_more_seeds_leave_the_first_ones_as_they_are():
    assert derive_seeds(3, "x", 7, count=9)[:4] == derive_seeds(3, "x", 7, count=4)
