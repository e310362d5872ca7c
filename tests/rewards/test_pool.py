"""A reward in processes of its own."""

import os
import signal
import time

import pytest
import ray
from PIL import Image

from verl_omni.rewards.choice import read_choices
from verl_omni.rewards.pool import ScorerPool, scorer_pool, start_pools

SCORERS = """
import os
from verl_omni.rewards import register_reward

@register_reward("pool_bright")
class Bright:
    def __init__(self, *, level: float = 1.0):
        if level < 0:
            raise ValueError("level below 0")
        self.level = level

    def __call__(self, images, ground_truths, prompts, extra_infos):
        if "die" in prompts:
            raise KeyError("no such thing")
        return [{"score": self.level * image.getpixel((0, 0))[0], "pid": os.getpid()} for image in images]

@register_reward("pool_short")
def short(images, *, level: float = 1.0):
    return [{"score": level} for _ in images]
"""
IMAGES = [Image.new("RGB", (2, 2), (i, 0, 0)) for i in range(3)]


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scorers")
    (folder / "pool_scorers.py").write_text(SCORERS)
    if not ray.is_initialized():
        paths = {"env_vars": {"PYTHONPATH": str(folder)}}
        ray.init(address="local", num_cpus=1, include_dashboard=False, runtime_env=paths)
    chosen = read_choices([
        {"name": "pool_bright", "processes": 2, "level": 2.0}, {"name": "pool_short", "processes": 1, "level": 3.0},
        {"name": "pool_bright", "label": "broken", "processes": 1, "level": -1.0},
    ])  # fmt: skip
    places = {scorer_pool(label): [{"num_cpus": 0}] * choice.processes for label, choice in chosen.items()}
    started = start_pools(chosen, "pool_scorers", places.get)
    yield {label: ScorerPool(processes) for label, processes in started.items()}
    ray.shutdown()


def call(pool: ScorerPool, prompts: list[str] | None = None) -> list[dict]:
    return pool(images=IMAGES, ground_truths=[""] * 3, prompts=prompts or [""] * 3, extra_infos=[{}] * 3)


def test_scores_come_from_other_processes_in_order(pools):
    pools["pool_bright"].load()
    answers = call(pools["pool_bright"])
    assert [a["score"] for a in answers] == [0.0, 2.0, 4.0]
    others = {a["pid"] for _ in range(2) for a in call(pools["pool_bright"])}
    assert len(others) == 2 and os.getpid() not in others
    assert [a["score"] for a in call(pools["pool_short"])] == [3.0] * 3


def test_it_is_loaded_once(pools, monkeypatch):
    """Later on `load` asks nobody: a process that scores would keep it waiting."""
    pools["pool_bright"].load()
    monkeypatch.setattr(ray, "get", lambda reference: pytest.fail("it asks"))
    pools["pool_bright"].load()


def test_what_it_raises_is_its_own(pools):
    with pytest.raises(KeyError, match="no such thing"):
        call(pools["pool_bright"], ["", "die", ""])


def test_one_that_cannot_be_loaded_says_why(pools):
    with pytest.raises(RuntimeError, match="ValueError: level below 0"):
        pools["broken"].load()


def test_a_process_that_is_killed_comes_back(pools):
    (victim,) = {a["pid"] for a in call(pools["pool_bright"])}
    os.kill(victim, signal.SIGKILL)
    end, seen = time.monotonic() + 60, set()
    while len(seen - {victim}) < 2:  # both processes score again, one of them new; until then some calls fail
        assert time.monotonic() < end
        try:
            answers = call(pools["pool_bright"])
        except ray.exceptions.RayActorError:
            continue
        assert [a["score"] for a in answers] == [0.0, 2.0, 4.0]
        seen |= {a["pid"] for a in answers}
