"""The user's reward function is asked once before a run starts: a mistake ends it, anything else is told."""

import os

import psutil
import pytest
from omegaconf import OmegaConf

from verl_omni.trainer.checks import reward_trial
from verl_omni.trainer.checks.reward_trial import try_reward
from verl_omni.utils.errors import RunError

ROW = {"data_source": "x", "prompt": "a cat", "reward_model": {"ground_truth": None}, "extra_info": {"n": 1}}


def asked(tmp_path, code: str, num_frames: int | None = None) -> str | None:
    (tmp_path / "mine.py").write_text(code)
    own = {"path": str(tmp_path / "mine.py"), "name": "compute_score", "reward_kwargs": {}}
    size = {"height": 16, "width": 32, "num_frames": num_frames}
    reward = {"custom_reward_function": own, "timeout": 60.0}
    config = OmegaConf.create({"reward": reward, "actor_rollout_ref": {"rollout": {"pipeline": size}}})
    return try_reward(config, ROW)


@pytest.mark.parametrize(
    "code, said",
    [
        ("def compute_score(image):\n    return imgae.size\n", "raised NameError: name 'imgae' is not defined"),
        ("def compute_score(image):\n    import no_such_module\n", "raised ModuleNotFoundError"),
        ("def compute_score(ground_truth):\n    return len(ground_truth)\n", "raised TypeError"),
        ("def compute_score(image):\n    pass\n", "returned None: expected a finite number"),
        ("def compute_score(images):\n    return [1.0]\n", "returned 1 for 2 images"),
        ("async def compute_score(image):\n    return image.sise\n", "raised AttributeError"),
    ],
)
def test_a_mistake_ends_the_run_before_it_starts(tmp_path, code, said):
    with pytest.raises(RunError) as error:
        asked(tmp_path, code)
    assert said in str(error.value) and "(asked for a grey image, before the run starts)" in str(error.value)


@pytest.mark.parametrize(
    "code, said",
    [
        ("def compute_score(image):\n    raise ValueError('no face')\n", "raised ValueError: no face"),
        ("def compute_score(image):\n    return {}[image.size]\n", "raised KeyError: (32, 16)"),
        ("def compute_score(image):\n    return float('nan')\n", "returned nan"),
        ("import sys\ndef compute_score(image):\n    sys.exit(1)\n", "wanted to end the process"),
    ],
)
def test_what_a_picture_may_be_to_blame_for_is_told(tmp_path, code, said):
    told = asked(tmp_path, code)
    assert said in told and "if it fails for drawn images too, the run will end" in told and "\n" not in told


@pytest.mark.parametrize(
    "code",
    [
        "def compute_score(image, prompt, extra_info):\n    return (image.size == (32, 16)) * 1.0 or imgae\n",
        "def compute_score(images, prompts):\n    return [float(p == 'a cat') for p in prompts]\n",
        "def compute_score(image, reward_router_address):\n    raise TypeError\n",
        "import os\ndef compute_score(image):\n    os._exit(3)\n",
    ],
)
def test_nothing_to_say(tmp_path, code):
    assert asked(tmp_path, code) is None


def test_a_video_is_grey_frames(tmp_path):
    assert asked(tmp_path, "def compute_score(image):\n    return len([f.size for f in image]) / 5\n", 5) is None


def test_nothing_stays_behind(tmp_path, monkeypatch):
    """Neither state in the function's module nor a process, also where it does not answer."""
    before = set(psutil.Process().children())
    monkeypatch.setattr(reward_trial, "LONGEST", 0.5)
    code = "import time\nfrom pathlib import Path\n\ndef compute_score(image):\n    {}\n    return 1.0\n"
    where = tmp_path / "asked"
    assert asked(tmp_path, code.format(f"Path({str(where)!r}).write_text(str(__import__('os').getpid()))")) is None
    assert where.read_text() != str(os.getpid())
    assert asked(tmp_path, code.format("time.sleep(600)")) is None
    assert set(psutil.Process().children()) <= before
