"""When samples are drawn, with which weights, and where a run would go on in the data."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_omni.data.prompt_loader import create_dataloader
from verl_omni.trainer.callbacks import Run
from verl_omni.trainer.diffusion import fully_async, pace
from verl_omni.trainer.diffusion.modes import PACES
from verl_omni.trainer.diffusion.pace import Draws, Pace, staleness


class Prompts:
    """Six of them, as a data set."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"prompt": f"prompt {i}"}


class Trainer:
    """Draws prompts and remembers when: (training step of the samples, version of the weights, what was drawn)."""

    def __init__(self, max_staleness=None, total_steps=4):
        config = SimpleNamespace(trainer=SimpleNamespace(max_staleness=max_staleness))
        self.run = Run(config, Path("run"), total_steps)
        self.loader = create_dataloader(Prompts(), 2, shuffle=False, seed=0)
        self.begun, self.waited = [], []

    def pace(self, mode: str) -> Pace:
        return PACES[mode](self, self.loader, self.run)

    def start_sampling(self, prompts, step):
        drawn = (step, self.run.step, prompts.non_tensor_batch["prompt"].tolist())
        self.begun.append(drawn)
        return lambda: self.waited.append(drawn) or drawn


def run(trainer: Trainer, mode: str) -> list[tuple]:
    paced, learned = trainer.pace(mode), []
    while trainer.run.step < trainer.run.total_steps:
        learned.append(paced.next())
        trainer.run.step += 1
    return learned


def test_a_pace_asks_its_trainer_for_nothing_but_what_is_declared():
    """Every `self.draws.<name>` of the paces is a member of `Draws`, and each member is asked for."""
    asked = set()
    for module in (pace, fully_async):
        asked |= set(re.findall(r"self\.draws\.(\w+)", inspect.getsource(module)))
    declared = set(Draws.__annotations__) | {name for name in vars(Draws) if not name.startswith("_")}
    assert asked == declared and len(declared) < 10


def test_in_turn_every_experience_is_of_the_weights_that_learn_from_it():
    for mode in ("colocated", "separate"):
        assert [(step, version) for step, version, _ in run(Trainer(), mode)] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_one_step_off():
    trainer = Trainer()
    learned = run(trainer, "one_step_off")
    assert [(step, version) for step, version, _ in learned] == [(0, 0), (1, 0), (2, 1), (3, 2)]
    assert learned == trainer.begun == trainer.waited  # none is drawn for nothing
    assert [prompts for *_, prompts in learned] == [prompts for *_, prompts in run(Trainer(), "colocated")]


def test_without_staleness_it_is_in_turn():
    assert run(Trainer(max_staleness=0), "one_step_off") == run(Trainer(), "separate")


def test_the_next_is_begun_before_the_first_is_learned():
    trainer = Trainer()
    ahead = trainer.pace("one_step_off")
    ahead.next()
    assert [step for step, *_ in trainer.begun] == [0, 1] and [step for step, *_ in trainer.waited] == [0]
    ahead.settle()
    ahead.settle()
    assert [step for step, *_ in trainer.waited] == [0, 1]
    trainer.run.step += 1
    assert ahead.next()[0] == 1


@pytest.mark.parametrize("mode", ["separate", "one_step_off"])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_resumed_run_learns_from_the_prompts_that_are_not_learned_from(mode, done):
    """What was being drawn when the run ended is drawn anew."""
    whole = run(Trainer(), mode)
    trainer = Trainer()
    ended = trainer.pace(mode)
    for _ in range(done):
        ended.next()
        trainer.run.step += 1
    resumed = Trainer()
    resumed.loader.load_state_dict(ended.data_state())
    resumed.run.step = done
    rest = run(resumed, mode)
    assert [(step, prompts) for step, _, prompts in rest] == [(step, prompts) for step, _, prompts in whole[done:]]
    assert rest[0][1] == done  # with the weights that it has


def test_staleness_is_counted_by_sample():
    assert staleness(3, [3, 3, 2, 1]) == {"staleness/mean": 0.75, "staleness/max": 2.0}
