"""`algorithm.filter_groups`: prompts whose images all have the same reward teach nothing; others take their place."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from tqdm import tqdm
from verl.protocol import DataProto

from verl_omni.agent_loop.outputs import join
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.group_queue import Group
from verl_omni.utils.suggest import unknown

SCORE = ("score", "seq_reward", "seq_final_reward")  # the last two are verl's names of it


class GroupFilter:
    """Says which groups teach something, and counts."""

    def __init__(self, settings: DiffusionTrainerConfig):
        self.config = settings.algorithm.filter_groups
        self.names = [self.config.metric] if self.config.metric else [*settings.algorithm.reward_weights] or ["score"]
        self._rewards, self._dropped, self._drawn = [], 0, 0

    def teaches(self, scores: DataProto) -> bool:
        """Whether the images of a prompt (of one branch of it, where it has several) differ in a reward.

        Of images whose reward failed nothing is known: where no two are left to compare, others say what is wrong.
        """
        rewards = scores.batch["rm_scores"][:, 0]
        scored = (~rewards.isnan()).nonzero()[:, 0].tolist()
        groups: dict[str, list[int]] = defaultdict(list)
        for row in scored:
            groups[scores.non_tensor_batch["uid"][row]].append(row)
        compared = [rows for rows in groups.values() if len(rows) > 1]
        differ = (len({self._value(scores, name, row) for row in rows}) > 1 for rows in compared for name in self.names)
        return any(differ) or not compared

    def _value(self, scores: DataProto, name: str, row: int) -> float:
        if name in SCORE:
            return scores.batch["rm_scores"][row, 0].item()
        told = scores.non_tensor_batch["reward_extra_info"][row]
        if not isinstance(told.get(name), int | float):
            raise ValueError(unknown("algorithm.filter_groups.metric", name, {"score", *told}))
        return float(told[name])

    # ---- counting ------------------------------------------------------------------------------------

    def see(self, scores: DataProto, dropped: bool) -> None:
        """One more group has been drawn."""
        self._rewards.append(scores.batch["rm_scores"][:, 0])
        self._dropped += dropped
        self._drawn += 1

    def tell(self, step: int, without_signal: int, prompts: int) -> dict[str, float]:
        """What was drawn since it was asked last, for a step of so many prompts; a line where any was dropped."""
        rewards = torch.cat(self._rewards) if self._rewards else torch.zeros(0)
        metrics = {
            "filter_groups/drawn": float(self._drawn),
            "filter_groups/dropped": float(self._dropped),
            "filter_groups/without_signal": float(without_signal),
            "filter_groups/reward_mean": rewards[~rewards.isnan()].mean().item(),
        }
        if self._dropped:
            tqdm.write(
                f"step {step}: {self._dropped} of {self._drawn} prompts had images of equal reward and were replaced"
                + (f"; {without_signal} of {prompts} still have (max_num_gen_batches)" if without_signal else "")
            )
        self._rewards, self._dropped, self._drawn = [], 0, 0
        return metrics


class DrawsGroups(Protocol):
    """Who draws, as far as the filter asks it."""

    group_filter: GroupFilter
    global_step: int
    actor_wg: Any
    pace: Any  # whose prompts come next

    def start_groups(
        self, prompts: DataProto, step: int, numbers: Sequence[int], places: Sequence[int], count: int, learns: bool
    ) -> Callable[[], list[Group]]:
        """Begin to draw groups of these numbers, for these places among the `count` of a step; waits for scores too."""

    def experience(
        self, names: tuple[str, ...], version: int, step: int, output: DataProto, scores: Callable[[], DataProto]
    ) -> Experience:
        """Samples of whole groups, and what waits for their scores."""


def start_filtered(trainer: DrawsGroups, prompts: DataProto, step: int) -> Callable[[], Experience]:
    """As `start_sampling` without a filter. A prompt that replaces another is drawn by who would have trained on that.

    Numbers go on from group to group, so that each has seeds of its own. What is drawn anew is drawn when the first
    rewards are there, with the weights of that time.
    """
    kept, count, learns = trainer.group_filter, len(prompts), step == trainer.global_step
    first = trainer.start_groups(prompts, step, range(count), range(count), count, learns)

    def filled() -> Experience:
        places: list[Group | None] = [None] * count
        missing, drawn, batches, seconds = list(range(count)), count, 1, {"images": 0.0, "rewards": 0.0}
        groups = first()
        while True:
            again = []
            for place, group in zip(missing, groups, strict=True):
                places[place] = group
                if not kept.teaches(group.scores):
                    again.append(place)
            for half in (groups[0].output, groups[0].scores):
                seconds = {name: spent + half.meta_info["timing"].get(name, 0.0) for name, spent in seconds.items()}
            last = batches == kept.config.max_num_gen_batches
            for place in missing:
                kept.see(places[place].scores, dropped=place in again and not last)
            if not again or last:
                break
            trainer.actor_wg.release(tuple(places[place].name for place in again))
            others = trainer.pace.prompts.take(len(again))
            numbers = range(drawn, drawn + len(again))
            groups = trainer.start_groups(others, step, numbers, again, count, learns)()
            missing, drawn, batches = again, drawn + len(again), batches + 1
        output, scores = join([group.output for group in places]), join([group.scores for group in places])
        output.meta_info["timing"], scores.meta_info["timing"] = ({k: seconds[k]} for k in ("images", "rewards"))
        names, version = tuple(group.name for group in places), min(group.version for group in places)
        experience = trainer.experience(names, version, step, output, lambda: scores)
        experience.metrics = kept.tell(step + 1, len(again), count)
        return experience

    return filled
