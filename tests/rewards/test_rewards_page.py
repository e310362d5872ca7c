"""docs/rewards.md: its table is what there is, and what it shows runs."""

import asyncio
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from verl_omni.rewards import get_reward_fn, make_scorer
from verl_omni.rewards.choice import read_choices
from verl_omni.rewards.reward_function import RewardFunction
from verl_omni.utils.responses import Latents

PAGE = (Path(__file__).parents[2] / "docs/rewards.md").read_text()


def settings_of(name: str) -> set[str]:
    reward = get_reward_fn(name)
    parameters = inspect.signature(reward.__init__ if inspect.isclass(reward) else reward).parameters.values()
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_the_table_has_every_scorer_with_its_settings():
    # in a process of its own: other tests register names here
    code = "from verl_omni.rewards import reward_names; print(*reward_names())"
    known = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    table = PAGE.partition("## Scorers")[2].partition("`model` and its like")[0]
    listed = {}
    for line in table.splitlines():
        cells = line.strip("|").split("|")
        names = re.findall(r"`(\w+)`", cells[0])
        listed |= {name: set(re.findall(r"`(\w+)`", cells[-1])) for name in names}
    assert listed == {name: settings_of(name) for name in known}


def test_the_lists_of_rewards_can_be_read():
    shown = re.findall(r"'reward\.scorers=(\[.*\])'", PAGE)
    assert [list(read_choices(yaml.safe_load(one))) for one in shown] == [
        ["vlm_judge"], ["ocr", "pickscore"], ["pickscore"],
    ]  # fmt: skip


def test_the_reward_of_ones_own():
    of_latents, code = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    own: dict = {}
    exec(of_latents, own)
    asked = {"response": Latents(torch.tensor([[[-1.0, 1.0]]])), "prompt": ""}
    (answer,) = asyncio.run(RewardFunction(own["compute_score"], "the page's").score([asked]))
    assert answer["score"] == pytest.approx(2**0.5)
    exec(code.replace('"brightness"', '"page_brightness"'), {"__name__": __name__})
    grey = Image.new("RGB", (4, 4), (204, 204, 204))
    (answer,) = make_scorer("page_brightness", {"wanted": 0.8})([grey], [None], [""], [{}])
    assert answer["score"] == 1.0
