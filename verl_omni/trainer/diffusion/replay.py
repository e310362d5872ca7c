"""A run again, from what it has written down: every group is drawn by weights of the version that drew it then."""

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_omni.trainer.diffusion.group_queue import Group, GroupQueue
from verl_omni.utils.run_files import read_metrics

ORDER = "order.jsonl"
DECIDES = (
    *("trainer.max_staleness", "trainer.seed", "data.train_files", "data.seed", "data.shuffle"),
    *("actor_rollout_ref.rollout.n", "actor_rollout_ref.rollout.seed", "actor_rollout_ref.model.path"),
)


def read_order(run_dir: str | Path) -> list[list[dict[str, Any]]]:
    """The groups that each training step took, from the first step on."""
    path = Path(run_dir).expanduser() / ORDER
    if not path.is_file():
        raise FileNotFoundError(f"trainer.replay={run_dir}: there is no {ORDER}; give the folder of a fully_async run")
    entries = read_metrics(path)
    if [entry["step"] for entry in entries] != list(range(1, len(entries) + 1)) or not entries:
        raise ValueError(f"trainer.replay={run_dir}: {ORDER} does not begin at step 1; the run had another mode then")
    return [entry["data"]["groups"] for entry in entries]


def check_same_settings(run_dir: str, config: DictConfig) -> None:
    """What decides which samples are drawn, and what is kept of them, is as it was then."""
    path = Path(run_dir).expanduser() / "config.yaml"
    then = OmegaConf.load(path) if path.is_file() else None
    for key in DECIDES if then is not None else ():
        was, now = OmegaConf.select(then, key), OmegaConf.select(config, key)
        if was != now:
            raise ValueError(f"trainer.replay={run_dir} had {key}={was}, and this run has {now}: set it as it was")


def check_replay(run_dir: str, own: str, steps: int, batch_size: int, most_behind: int | None = None) -> None:
    """A run of so many steps, in a folder of its `own`, can be the one that is written down there.

    `most_behind` are the steps that samples may be behind, where the loss needs the policies that drew them.
    """
    order = read_order(run_dir)
    behind = max(step - group["version"] for step, groups in enumerate(order[:steps]) for group in groups)
    if most_behind is not None and behind > most_behind:
        raise ValueError(
            f"trainer.replay={run_dir} has samples {behind} steps behind: set trainer.max_staleness={behind} or more"
        )
    if Path(run_dir).expanduser().resolve() == Path(own).expanduser().resolve():
        raise ValueError(
            f"trainer.replay={run_dir} is the folder of this run itself: choose another with trainer.experiment_name"
        )
    if steps > len(order):
        raise ValueError(
            f"trainer.replay={run_dir} has {len(order)} steps and this run {steps}: set trainer.total_training_steps="
            f"{len(order)} or less"
        )
    if len(order[0]) != batch_size:
        raise ValueError(
            f"trainer.replay={run_dir} took {len(order[0])} prompts a step: set data.train_batch_size={len(order[0])}"
        )


class RecordedQueue(GroupQueue):
    """Gives the batches of a recorded run.

    As soon as weights of a version are there, all that they drew then is drawn with them, together with the same
    others. It waits for the step that took it.
    """

    def __init__(self, batch_size: int, steps: int, run_dir: str | Path):
        super().__init__(batch_size, steps)
        self.order = read_order(run_dir)[:steps]
        self.draws: dict[int, set[tuple[int, ...]]] = {}
        for groups in self.order:
            for group in groups:
                self.draws.setdefault(group["version"], set()).add(tuple(group["drawn_with"]))
        self._taken = {(group["group"], group["version"]) for groups in self.order for group in groups}
        self._missing: set[int] = set()  # what the weights that are there now have still to draw
        self._version = -1

    def horizon(self, version: int) -> int:
        drawn = [draw for number, draws in self.draws.items() if number <= version for draw in draws]
        return max(number for draw in drawn for number in draw) // self.batch_size

    def open(self, step: int) -> None:
        """It is the version that says what is drawn."""

    def enter(self, group: Group) -> None:
        """What was dropped then, and is here only because others were drawn with it, is not kept."""
        self._missing.discard(group.number)
        if (group.number, group.version) in self._taken:
            self.scored.append(group)

    def take(self, version: int) -> list[Group]:
        if version != self._version:
            self._version = version
            for draw in sorted(self.draws.get(version, ())):
                self.to_draw.put_nowait(draw)
                self._missing |= set(draw)
        if self._missing:
            return []
        took = {(group["group"], group["version"]) for group in self.order[version]}
        return self._train([group for group in self.scored if (group.number, group.version) in took])
