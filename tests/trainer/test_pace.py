"""When samples are drawn, with which weights, and where a run would go on in the data."""

from types import SimpleNamespace

import pytest

from verl_omni.data.prompt_loader import create_dataloader
from verl_omni.trainer.diffusion.modes import PACES
from verl_omni.trainer.diffusion.pace import staleness


class Prompts:
    """Six of them, as a data set."""

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {"prompt": f"prompt {i}"}


class Trainer:
    """Draws prompts and remembers when: (training step of the samples, version of the weights, what was drawn)."""

    def __init__(self, max_staleness=None, total_steps=4):
        self.config = SimpleNamespace(trainer=SimpleNamespace(max_staleness=max_staleness))
        self.train_loader = create_dataloader(Prompts(), 2, shuffle=False, seed=0)
        self.global_step, self.total_steps = 0, total_steps
        self.begun, self.waited = [], []

    def start_sampling(self, prompts, step):
        drawn = (step, self.global_step, prompts.non_tensor_batch["prompt"].tolist())
        self.begun.append(drawn)
        return lambda: self.waited.append(drawn) or drawn

    def sample(self, prompts):
        return self.start_sampling(prompts, self.global_step)()


def run(trainer: Trainer, mode: str) -> list[tuple]:
    pace, learned = PACES[mode](trainer), []
    while trainer.global_step < trainer.total_steps:
        learned.append(pace.next())
        trainer.global_step += 1
    return learned


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
    pace = PACES["one_step_off"](trainer)
    pace.next()
    assert [step for step, *_ in trainer.begun] == [0, 1] and [step for step, *_ in trainer.waited] == [0]
    pace.settle()
    pace.settle()
    assert [step for step, *_ in trainer.waited] == [0, 1]
    trainer.global_step += 1
    assert pace.next()[0] == 1


@pytest.mark.parametrize("mode", ["separate", "one_step_off"])
@pytest.mark.parametrize("done", [1, 2, 3])
def test_a_resumed_run_learns_from_the_prompts_that_are_not_learned_from(mode, done):
    """What was being drawn when the run ended is drawn anew."""
    whole = run(Trainer(), mode)
    trainer = Trainer()
    pace = PACES[mode](trainer)
    for _ in range(done):
        pace.next()
        trainer.global_step += 1
    resumed = Trainer()
    resumed.train_loader.load_state_dict(pace.data_state())
    resumed.global_step = done
    rest = run(resumed, mode)
    assert [(step, prompts) for step, _, prompts in rest] == [(step, prompts) for step, _, prompts in whole[done:]]
    assert rest[0][1] == done  # with the weights that it has


def test_staleness_is_counted_by_sample():
    assert staleness(3, [3, 3, 2, 1]) == {"staleness/mean": 0.75, "staleness/max": 2.0}
