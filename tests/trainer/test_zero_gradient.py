"""Steps that teach nothing say so, and five in a row end the run: for both trainers, which share the loop."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from e2e_runs import metrics, run_here, settings
from verl.protocol import DataProto

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.report.timeline import Timeline
from verl_omni.trainer.callbacks import Run, UsersCallbacks
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
from verl_omni.trainer.run_folder.saving import Saving
from verl_omni.utils.arrays import object_array
from verl_omni.utils.errors import RunError
from verl_omni.workers.layout import Layout

EQUAL, DIFFERENT = [1.0, 1.0, 0.5, 0.5], [1.0, 0.0, 0.5, 0.5]


class Prompts(list):
    taken = 0

    def state_dict(self):
        return {}


class Loop(BaseRayDiffusionTrainer):
    """The loop of training with steps that are given: (metrics of the update, rewards)."""

    def __init__(self, steps: list[tuple[dict[str, float], list[float]]]):
        self.config = DiffusionTrainerConfig()
        self.steps, self.total_steps = steps, len(steps)
        self.run, self.callbacks = Run(self.config, Path("run"), len(steps)), UsersCallbacks([])
        self.train_loader, self.val_loader, self.online = Prompts(range(len(steps))), None, True
        self.checkpoints = SimpleNamespace(saving=Saving(self.config.trainer), trained_groups=None)
        self.layout, self.timeline, self.saved, self.logged = Layout(), Timeline(), [], []

    def training_step(self, pace, timing):
        metrics, rewards = self.steps[self.global_step]
        batch = DataProto.from_dict(
            {"sample_level_rewards": torch.tensor(rewards)},
            {"uid": object_array(["a", "a", "b", "b"]), "data_source": object_array(["x"] * 4)}
            | {name: object_array([None] * 4) for name in ("written", "keep_to")},
        )
        return batch, dict(metrics)

    def changes(self) -> list[int]:
        return [self.global_step]

    def save_checkpoint(self, last: bool = False) -> None:
        self.saved.append(self.global_step)

    def see_to_checkpoint(self) -> None:
        """None is written while training goes on."""

    def _finish_saving(self) -> None:
        pass

    def train(self) -> None:
        self._train(SimpleNamespace(log=lambda metrics, step: self.logged.append(step)))


NONE, SOME, SKIPPED = {"actor/grad_norm": 0.0}, {"actor/grad_norm": 1e-30}, {"training/skipped_updates": 1.0}


def test_five_steps_without_a_gradient_end_the_run(capsys):
    loop = Loop([(SOME, DIFFERENT)] * 2 + [(NONE, DIFFERENT)] * 20)
    with pytest.raises(RunError, match="0 for every weight from step 3 to 7.*noise_level and sde_type.*adv_clip_max"):
        loop.train()
    assert loop.global_step == 7 and loop.saved == [7] and set(loop.logged) == set(range(1, 8))
    lines = [line for line in capsys.readouterr().out.splitlines() if "the gradient is 0" in line]
    assert len(lines) == 5 and lines[0].startswith("step 3: ") and "(5 in a row, 5 end the run)" in lines[-1]


def test_a_gradient_in_between_begins_the_count_anew(capsys):
    loop = Loop([(NONE, DIFFERENT)] * 4 + [(SOME, DIFFERENT)] + [(NONE, DIFFERENT)] * 4)
    loop.train()
    assert loop.saved == [9]
    assert capsys.readouterr().out.count("the gradient is 0") == 8


@pytest.mark.parametrize(
    ("metrics", "rewards", "cause"),
    [
        (NONE, EQUAL, "the images of each prompt all have the same reward"),
        (SKIPPED, EQUAL, "the images of each prompt all have the same reward"),
        (SKIPPED, DIFFERENT, "there was no pair to learn from"),
    ],
)
def test_the_cause_is_named_where_the_step_shows_it(metrics, rewards, cause, capsys):
    with pytest.raises(RunError, match=cause):
        Loop([(metrics, rewards)] * 6).train()
    assert capsys.readouterr().out.count(cause) == 5


@pytest.mark.parametrize("algorithm", ["flow_grpo", "diffusion_nft", "dpo"])
def test_a_run_of_equal_rewards_ends(tmp_path, monkeypatch, process_group, algorithm):
    """0.7 is no number that a float holds: the mean of several is off by a rounding step."""
    (tmp_path / "reward.py").write_text("def compute_score(image, prompt):\n    return 0.7\n")
    arguments = settings(
        tmp_path / "run", f"actor_rollout_ref.model.algorithm={algorithm}", "actor_rollout_ref.rollout.n=7",
        "reward.custom_reward_function.path=reward.py", "trainer.total_training_steps=8", "data.val_files=null",
    )  # fmt: skip
    if algorithm == "diffusion_nft":
        arguments += ["algorithm.adv_mode=binary", "actor_rollout_ref.actor.diffusion_loss.extra.beta=0.1"]
    with pytest.raises(RunError, match="0 for every weight from step 1 to 5.*all have the same reward"):
        run_here(arguments, tmp_path, monkeypatch)
    assert all(line.get("actor/grad_norm", 0.0) == 0.0 for line in metrics(tmp_path / "run").values())
