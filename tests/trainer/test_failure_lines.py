"""An error of another process, as Ray hands it on, is told in its own words."""

import ray.cloudpickle as cloudpickle
import torch
from ray.exceptions import RayTaskError

from verl_omni.rewards.reward_function import RewardError
from verl_omni.trainer.failures import users_mistake, what_failed


def through_ray(error: Exception, processes: int = 1) -> Exception:
    """As the caller gets it who waits for a task that failed in another process, or waited for one that did."""
    for _ in range(processes):
        wrapped = RayTaskError("task", "Traceback (most recent call last):\n ...", error)
        error = RayTaskError.from_bytes(wrapped.to_bytes()).as_instanceof_cause()
    return error


def test_a_reward_that_failed_two_processes_away():
    said = 'reward function compute_score (reward.py) raised KeyError: "a" (prompt: "a cat")'
    assert what_failed(through_ray(RewardError(said), processes=2)) == said


def test_other_errors_have_their_type_and_the_moment():
    line = what_failed(through_ray(RuntimeError("first line\nand second")))
    assert line.startswith("RuntimeError during the ") and line.endswith(": first line and second")


def test_a_gpu_that_is_full_is_one_line():
    assert what_failed(through_ray(torch.OutOfMemoryError("CUDA out of memory"))) == "CUDA out of memory"


def test_a_workers_value_error_is_no_mistake_of_the_settings_before_it_is_known_to_be_one():
    error = through_ray(ValueError("bad"))
    assert users_mistake(error) is None and what_failed(error) == "bad"
    assert users_mistake(cloudpickle.loads(cloudpickle.dumps(ValueError("bad")))) == "bad"
