"""The guide's file, taken literally, and the settings that the algorithms page promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_omni.algorithms import get_algorithm, resolve_algorithm_defaults
from verl_omni.config import DiffusionLossConfig, DiffusionRolloutAlgoConfig

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = "integrating_a_new_policy_gradient_algorithm_for_diffusion_model.md"

USE = """
import numpy as np, torch
from verl_omni.algorithms import estimate_advantages, get_diffusion_loss_fn, resolve_algorithm_defaults
from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.config import DiffusionActorConfig, DiffusionLossConfig, DiffusionRolloutAlgoConfig

import_external_lib("soft_grpo")
algo, loss = resolve_algorithm_defaults(
    "soft_grpo", DiffusionRolloutAlgoConfig(), DiffusionLossConfig(loss_mode="soft_grpo", extra={"penalty": 20.0})
)
assert (algo.sde_type, algo.noise_level, loss.extra) == ("fading_sde", 0.8, {"penalty": 20.0})

scheduler = FlowMatchSDEDiscreteScheduler()
scheduler.set_timesteps(4)
x, v, t = torch.randn(3, 2, 5), torch.randn(3, 2, 5), scheduler.timesteps[[0, 1, 2]]
euler = scheduler.sample_previous_step(x, v, t, noise_level=0.0, sde_type=algo.sde_type)[0]
ode = scheduler.sample_previous_step(x, v, t, sde_type="ode")[0]
assert torch.equal(euler, ode)
step = scheduler.sample_previous_step(x, v, t, noise_level=algo.noise_level, sde_type=algo.sde_type)

rewards, index = torch.tensor([0.3, 0.9, 0.3, 0.1]), np.array(["p", "p", "p", "q"])
advantages, _ = estimate_advantages("soft_grpo", sample_level_rewards=rewards, index=index, global_std=True)
assert advantages.tolist() == [-0.5, 1.0, -0.5, 0.0]

loss_fn = get_diffusion_loss_fn("soft_grpo")
result = loss_fn(
    config=DiffusionActorConfig(diffusion_loss=loss),
    model_output={"log_probs": step[1]},
    data={"old_log_probs": step[1] - 0.1, "advantages": advantages[:3]},
)
torch.testing.assert_close(result.loss, torch.tensor(20 * 0.1**2), rtol=1e-4, atol=1e-6)
"""


def test_the_guides_file_works_as_it_stands(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / GUIDE).read_text(), flags=re.S)
    (tmp_path / "soft_grpo.py").write_text(code)
    (tmp_path / "use.py").write_text(USE)
    done = subprocess.run([sys.executable, "use.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def documented_settings():
    """(algorithm, setting, value) of the tables in algorithms.md."""
    for row in re.findall(
        r"^\| `(\w+)` \| [^|]+ \| (`[^|]*=[^|]*) \|", (DOCS / "algorithms.md").read_text(), flags=re.M
    ):
        for setting, value in re.findall(r"`(?:extra\.)?(\w+)=([^`]+)`", row[1]):
            yield row[0], setting, value


@pytest.mark.parametrize(("name", "setting", "value"), list(documented_settings()))
def test_documented_defaults_are_the_real_ones(name, setting, value):
    rollout, loss = resolve_algorithm_defaults(name, DiffusionRolloutAlgoConfig(), DiffusionLossConfig(loss_mode=name))
    real = {**vars(rollout), **vars(loss), **loss.extra, **get_algorithm(name).algorithm}[setting]
    expected = {"true": True, "false": False}.get(value, value)
    assert real == (expected if isinstance(real, bool | str) else float(expected))


def test_every_algorithm_of_the_page_was_read():
    assert {name for name, _, _ in documented_settings()} == {
        "flow_grpo", "mix_grpo", "dance_grpo", "flow_dppo", "dpo", "diffusion_nft", "awm",
        "tempflow_grpo", "flash_grpo", "opd", "dgpo", "crd", "draft",
    }  # fmt: skip
