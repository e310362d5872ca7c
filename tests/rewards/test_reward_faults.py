"""A reward function that hangs or wants to end the process: one line with its name and the prompt, and never a 0."""

import asyncio
import sys
import time

import pytest
from omegaconf import OmegaConf
from test_reward_functions import sample

from verl_omni.rewards.image_manager import ImageRewardManager

LIMIT = 0.3


def score(function, count: int = 1, limit: float = LIMIT) -> list[dict]:
    config = OmegaConf.create({"reward": {"batch_size": 4, "timeout": limit, "on_failure": "stop"}})

    async def run():
        manager = ImageRewardManager(config, None, compute_score=function)
        return await asyncio.gather(*(manager.run_single(sample(i)) for i in range(count)))

    return asyncio.run(run())


def hangs(prompt):
    time.sleep(2)
    return 1.0


async def waits(prompt):
    await asyncio.sleep(100)
    return 1.0


async def blocks(prompt):
    time.sleep(2)  # where it should have awaited: its event loop stands still
    return 1.0


def hangs_on_many(prompts):
    time.sleep(2)
    return [1.0] * len(prompts)


@pytest.mark.parametrize("function", [hangs, waits, blocks, hangs_on_many])
def test_no_answer_in_time(function):
    with pytest.raises(ValueError) as caught:
        score(function)
    expected = f'reward function {function.__name__} gave no answer within 0.3 s (prompt: "prompt 0"): mend it'
    assert str(caught.value).startswith(expected)


def test_time_in_the_queue_does_not_count(monkeypatch):
    """Five at once, so that the last ones wait for longer than one may take; a busy machine has time to spare."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)

    def quick(prompt):
        time.sleep(0.2)
        return 1.0

    began = time.monotonic()
    assert [answer["reward_score"] for answer in score(quick, count=60, limit=2)] == [1.0] * 60
    assert time.monotonic() - began > 2, "they did wait for each other"


def exits(prompt):
    sys.exit(3)


def interrupts(prompt):
    raise KeyboardInterrupt


async def exits_later(prompt):
    await asyncio.sleep(0)
    sys.exit()


def exits_on_many(prompts):
    sys.exit()


@pytest.mark.parametrize("function", [exits, interrupts, exits_later, exits_on_many])
def test_a_function_does_not_end_the_process(function):
    with pytest.raises(ValueError) as caught:
        score(function, limit=60)
    kind = "KeyboardInterrupt" if function is interrupts else "SystemExit"
    expected = f'reward function {function.__name__} wanted to end the process ({kind}) (prompt: "prompt 0")'
    assert str(caught.value) == expected
