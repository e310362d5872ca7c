"""`verl-omni check` and `overfit`: a run's own parts, in one process, before it is started."""

import sys
from pathlib import Path

import pytest
from PIL import Image
from tiny_runs import tiny_settings

from verl_omni.cli import check, overfit
from verl_omni.cli.overfit import verdict
from verl_omni.report.run_state import read_state

RED = "import numpy as np\n\ndef compute_score(image):\n    return float(np.asarray(image)[..., 0].mean()) / 255\n"

ENGINE = """
from pathlib import Path

from verl_omni.workers.rollout import register_rollout
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout
from verl_omni.workers.rollout.diffusers_rollout.server import DiffusersServer


@register_rollout("mine_in_a_check", server=DiffusersServer)
class Mine(DiffusersRollout):
    def draw_batch(self, requests):
        Path("drawn_by_mine").touch()
        return super().draw_batch(requests)
"""


@pytest.fixture
def here(tmp_path, monkeypatch, process_group):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, monkeypatch, *arguments) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["verl-omni", *map(str, arguments)])
    try:
        command.main()
    except SystemExit as ended:
        return ended.code


def test_one_image_is_drawn_and_scored(here, monkeypatch, capsys):
    """With the settings of a run on eight devices and servers, of which there is one here, and by the run's engine."""
    (here / "engine_of_mine.py").write_text(ENGINE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    cluster = ["trainer.n_gpus_per_node=2", "trainer.mode=one_step_off", "rollout.n_gpus_per_node=2"]
    arr = "actor_rollout_ref."
    engine = [f"{arr}model.external_lib=engine_of_mine.py", f"{arr}rollout.name=mine_in_a_check"]
    assert run(check, monkeypatch, *tiny_settings(here), *cluster, *engine) is None
    assert (here / "drawn_by_mine").exists()
    shown = capsys.readouterr().out
    assert 'Prompt: "a cat"' in shown and "A run with these settings can start." in shown
    image = Image.open(here / "outputs/check/validation/step_0/00000.png")
    assert image.size == (32, 32)
    assert f"Score:  {sum(image.getpixel((0, 0))) / 765:.4f}" in shown
    assert not (here / "run").exists(), "the run's own folder is left alone"


@pytest.mark.parametrize(
    "reward, line",
    [
        ("def compute_score(image):\n    raise OSError('no judge')\n", "raised OSError: no judge (prompt: \"a cat\")"),
        ("def compute_score(image):\n    return 'good'\n", "returned 'good': expected a finite number"),
    ],
)
def test_a_reward_that_fails_is_known_before_a_run(here, monkeypatch, reward, line):
    settings = tiny_settings(here)
    (here / "mine.py").write_text(reward)
    said = run(check, monkeypatch, *settings)
    assert said.startswith("error: ") and line in said and "\n" not in said


@pytest.mark.parametrize("command", [check, overfit])
def test_a_mistake_in_a_reward_is_known_before_libraries_are_loaded(command, here, monkeypatch, capsys):
    settings = tiny_settings(here)
    (here / "mine.py").write_text("def compute_score(image):\n    return imge.size[0]\n")
    assert "raised NameError: name 'imge' is not defined" in run(command, monkeypatch, *settings)
    assert "libraries" not in capsys.readouterr().out


def test_what_train_refuses_a_check_refuses(here, monkeypatch, capsys):
    said = run(check, monkeypatch, *tiny_settings(here), "data.train_batch_size=200")
    assert said.startswith("error: data.train_batch_size=200 is more than the 3 prompts")
    assert "settings, data and rewards ... no" in capsys.readouterr().out


def test_one_prompt_is_learned(here, monkeypatch, capsys):
    more = {"actor_rollout_ref.rollout.n": 8, "actor_rollout_ref.actor.optim.lr": 0.003}
    more["actor_rollout_ref.actor.diffusion_loss.clip_ratio"] = 0.1
    settings = tiny_settings(here, **more)
    (here / "mine.py").write_text(RED)
    assert run(overfit, monkeypatch, *settings, "--steps", 12) == 0
    assert "Learned: the mean reward went from" in capsys.readouterr().out
    assert (here / "outputs/overfit/prompt.jsonl").read_text().count("\n") == 1
    state = read_state(here / "outputs/overfit/run")
    assert (state.word, state.step, state.total) == ("finished", 12, 12)
    (here / "mine.py").write_text("def compute_score(image):\n    return 0.25\n")
    assert run(overfit, monkeypatch, *settings, "--steps", 1) == 1
    shown = capsys.readouterr().out
    assert "all images of a step scored the same (0.2500 at first), from which nothing can be learned" in shown


def steps(*means: float, spread: float = 0.2, gradient: float = 1.0) -> list[dict[str, float]]:
    names = ("critic/rewards/mean", "critic/rewards/max", "critic/rewards/min", "actor/grad_norm")
    return [dict(zip(names, (m, m + spread / 2, m - spread / 2, gradient), strict=True)) for m in means]


@pytest.mark.parametrize(
    "metrics, target, learned, why",
    [
        (steps(0.3, 0.4, 0.5, 0.5, 0.5), None, True, "from 0.3000 to 0.5000 in 5 steps; the goal was 0.4000"),
        (steps(0.3, 0.4, 0.5, 0.5, 0.5), 1.0, False, "not yet: the mean reward rose"),
        (steps(0.3, 0.1, 0.1, 0.1), None, False, "fell, from 0.3000 to 0.1000 in 4 steps; lower"),
        (steps(0.3, 0.31, 0.3, 0.31), None, False, "hardly moved"),
        (steps(0.3, 0.3, gradient=0.0), None, False, "the gradient was 0 in every step"),
        (steps(1.0, 1.0, spread=0.0), 1.0, True, "nothing left to learn"),
        (steps(0.5, 0.5, spread=0.0), 1.0, False, "scored the same (0.5000 at first)"),
    ],
)
def test_the_verdict(metrics, target, learned, why):
    told, line = verdict(metrics, target)
    assert told is learned and why in line


def test_a_page_says_how_they_are_typed(monkeypatch, capsys):
    for command in (check, overfit):
        run(command, monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert "usage: verl-omni check [RECIPE]" in shown and "usage: verl-omni overfit [RECIPE]" in shown
    assert not Path("outputs/check").exists()
