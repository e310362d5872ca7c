"""What each reward does, by name: its numbers in every step, and a word where one looks wrong."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from verl.protocol import DataProto

STEPS = 10  # over which a course is judged
FAR = 4.0  # standard errors that are no chance
MANY = 16  # images of a prompt: users saw that more of them speed hacking up
ALIKE = 0.9  # share of prompts whose images all have the same score, from which a reward has nothing more to teach


def reward_columns(batch: DataProto, labels: Iterable[str]) -> dict[str, list[tuple[str, float]]]:
    """Reward -> (group, score) of every image that it scored.

    With several rewards (`labels`) each one's score is among what the reward told; else a row's reward is that of its
    data_source.
    """
    columns: dict[str, list[tuple[str, float]]] = defaultdict(list)
    rows = batch.non_tensor_batch
    labels = list(labels)
    scores = batch.batch["sample_level_rewards"].tolist()
    for i, uid in enumerate(rows["uid"]):
        if labels:
            told = rows["reward_extra_info"][i]
            for label in labels:
                if label in told:
                    columns[label].append((uid, float(told[label])))
        else:
            columns[str(rows["data_source"][i])].append((uid, scores[i]))
    return columns


def reward_metrics(batch: DataProto, labels: Iterable[str]) -> dict[str, float]:
    """`reward/<name>/{mean,std,min,max,zero_std_ratio}` and `reward/failed`; nothing for cached pairs."""
    if "sample_level_rewards" not in batch.batch.keys() or "uid" not in batch.non_tensor_batch:
        return {}
    metrics = {"reward/failed": float(batch.meta_info.get("failed", 0))}
    for name, scored in reward_columns(batch, labels).items():
        values, groups = [score for _, score in scored], defaultdict(set)
        for uid, score in scored:
            groups[uid].add(score)
        least = min(values)
        offsets = np.array(values) - least
        metrics |= {
            f"reward/{name}/mean": least + float(np.mean(offsets)),  # of equal scores it is that score, to the last bit
            f"reward/{name}/std": float(np.std(offsets)),
            f"reward/{name}/min": least,
            f"reward/{name}/max": max(values),
            f"reward/{name}/zero_std_ratio": float(np.mean([len(scores) == 1 for scores in groups.values()])),
        }
    return metrics


class RewardWatch:
    """Says once of each reward that it has saturated or collapsed, and of two that they pull in opposite directions."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        """`weights` of several rewards: of one that is below 0, less is better."""
        self._weights = dict(weights or {})
        self._first: dict[str, list[float]] = defaultdict(list)
        self._last: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=STEPS))
        self._alike: dict[str, int] = defaultdict(int)
        self._said: set[tuple[str, ...]] = set()

    def see(self, metrics: Mapping[str, float]) -> list[str]:
        """What to say after a step with these metrics."""
        means = [key for key in metrics if key.startswith("reward/") and key.endswith("/mean")]
        names = [key.removeprefix("reward/").removesuffix("/mean") for key in means]
        for name in names:
            mean = metrics[f"reward/{name}/mean"]
            if len(self._first[name]) < STEPS:
                self._first[name].append(mean)
            self._last[name].append(mean)
            alike = metrics[f"reward/{name}/zero_std_ratio"] >= ALIKE
            self._alike[name] = self._alike[name] + 1 if alike else 0
        lines = []
        for name in names:
            if self._alike[name] >= STEPS:
                lines += self._once(
                    ("saturated", name),
                    f'reward "{name}": for {STEPS} steps the images of nearly every prompt have the same score '
                    f"({self._last[name][-1]:.3g}); it has nothing more to teach",
                )
        course = {name: self._course(name) for name in names}
        for name in names:
            if course[name] <= -FAR:
                lines += self._once(
                    ("collapsed", name),
                    f'reward "{name}" has gone from {np.mean(self._first[name]):.3g} to '
                    f"{np.mean(self._last[name]):.3g}, which is worse: look at the images, at the learning rate and at "
                    "use_kl_loss",
                )
        size = metrics.get("critic/rewards/group_size", 0)
        hastened = f", and at rollout.n: groups of {size:g} images, as here, speed it up" if size >= MANY else ""
        for up in names:
            for down in names:
                if course[up] >= FAR and course[down] <= -FAR:
                    lines += self._once(
                        ("against", up, down),
                        f'reward "{up}" gets better while "{down}" gets worse: the model gives one up for the other; '
                        f"look at their weights in reward.scorers{hastened}",
                    )
        return lines

    def _course(self, name: str) -> float:
        """How much better the last steps' mean is than the first steps', in standard errors of their difference."""
        first, last = self._first[name], list(self._last[name])
        if len(first) < STEPS or first == last:
            return 0.0
        spread = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / STEPS)
        moved = float(np.mean(last) - np.mean(first)) * math.copysign(1.0, self._weights.get(name, 1.0))
        return moved / spread if spread > 0 else math.copysign(math.inf, moved) if moved else 0.0

    def _once(self, what: tuple[str, ...], line: str) -> Sequence[str]:
        if what in self._said:
            return []
        self._said.add(what)
        return [line]
