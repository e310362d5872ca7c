"""What a run that does not learn shows in its metrics, and what to change: the table of docs/debugging.md in code."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median, variance

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.report.notices import notice
from verl_omni.trainer.callbacks import Callback, Run, Step

STEPS = 5  # over which a metric is looked at
FIRST = 3  # which say what a gradient is like
FLAT = 30  # after so many a reward should have moved


@dataclass(frozen=True)
class Symptom:
    """What is seen, in which metric, and what to do: the console and docs/debugging.md have the same words."""

    words: str
    metric: str
    remedy: str


CLIPPED = Symptom(
    "nearly every ratio is clipped",
    "actor/pg_clipfrac",
    "lower actor.optim.lr, raise actor.diffusion_loss.clip_ratio, or raise rollout.algo.noise_level if it is low",
)
EXPLODES = Symptom(
    "the gradient explodes", "actor/grad_norm", "lower actor.optim.lr, or raise rollout.algo.noise_level if it is low"
)
FLAT_REWARD = Symptom(
    "the reward stays where it is",
    "critic/rewards/mean",
    "raise actor.optim.lr or rollout.n, and try one prompt with `verl-omni overfit`",
)
ALIKE = Symptom(
    "the images of most prompts score the same",
    "critic/rewards/zero_std_ratio",
    "set algorithm.filter_groups.enable=true, raise rollout.n, or take a reward with more steps",
)
NOISY = Symptom(
    "training's images score far below validation's",
    "critic/rewards/mean",
    "lower rollout.algo.noise_level or raise rollout.pipeline.num_inference_steps",
)
FEW = Symptom("groups are small", "critic/rewards/group_size", "raise rollout.n, with fewer prompts a step if need be")
STALE = Symptom(
    "samples are old and their ratios are clipped",
    "staleness/mean",
    "lower trainer.max_staleness, or set algorithm.rollout_correction.rollout_is=step",
)
SAME = Symptom(
    "the images of each prompt become alike",
    "critic/diversity",
    "set actor.use_kl_loss=true, lower actor.optim.lr, or stop earlier, if the images should differ",
)
METRICS = ("actor/pg_clipfrac", "actor/grad_norm", "critic/rewards/", "critic/diversity", "staleness/mean")


def updates_of(config: DiffusionTrainerConfig) -> int:
    """Optimizer steps of a training step."""
    actor = config.actor_rollout_ref.actor
    return max(1, config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs


class Symptoms(Callback):
    """Says each of them once, when it has lasted for some steps."""

    def __init__(self, updates: int) -> None:
        """`updates`: optimizer steps of a training step. In the first of them every ratio is 1, and none is
        clipped, unless samples are stale.
        """
        self._most_clipped = (updates - 1) / updates
        self._seen: list[dict[str, float]] = []
        self._said: set[Symptom] = set()
        self._checks: dict[Symptom, Callable[[Mapping[str, float]], str | None]] = {
            CLIPPED: self._clipped,
            EXPLODES: self._explodes,
            FLAT_REWARD: self._flat,
            ALIKE: self._alike,
            NOISY: self._noisy,
            FEW: self._few,
            STALE: self._stale,
            SAME: self._same,
        }

    def on_step_end(self, run: Run, step: Step) -> None:
        for line in self.see(step.metrics):
            notice(run.folder, line, step.number)

    def see(self, metrics: Mapping[str, float]) -> list[str]:
        """What to say after a step with these metrics."""
        self._seen.append({name: value for name, value in metrics.items() if name.startswith(METRICS)})
        lines = []
        for symptom, check in self._checks.items():
            if symptom not in self._said and (told := check(metrics)):
                self._said.add(symptom)
                lines.append(f"{symptom.words} ({symptom.metric} {told}): {symptom.remedy}")
        return lines

    def _of(self, metric: str, steps: slice) -> list[float]:
        """The metric in some steps; empty where one of them has none."""
        values = [seen.get(metric) for seen in self._seen[steps]]
        return [] if None in values else values

    def _last(self, metric: str, steps: int = STEPS) -> list[float]:
        return self._of(metric, slice(-steps, None)) if len(self._seen) >= steps else []

    def _clipped(self, metrics: Mapping[str, float]) -> str | None:
        return self._clips_more_than(0.8)

    def _clips_more_than(self, share: float) -> str | None:
        """Of what can be clipped: of stale samples the first update's too."""
        values = self._last(CLIPPED.metric)
        most = 1.0 if any(self._last(STALE.metric)) else self._most_clipped
        return f"{fmean(values):.2f} of {most:.2f}" if values and most and fmean(values) >= share * most else None

    def _explodes(self, metrics: Mapping[str, float]) -> str | None:
        """Two steps in a row beyond ten times the first ones, which are few: it may begin with the third."""
        first, last = self._of(EXPLODES.metric, slice(FIRST)), self._last(EXPLODES.metric, 2)
        usual = median(first) if first and len(self._seen) > FIRST + 1 else 0.0
        return f"{usual:.3g} at first, now {min(last):.3g}" if usual and last and min(last) > 10 * usual else None

    def _flat(self, metrics: Mapping[str, float]) -> str | None:
        """After so many steps the last third is not above the first by more than chance."""
        if len(self._seen) != FLAT:
            return None
        third = FLAT // 3
        first, last = self._of(FLAT_REWARD.metric, slice(third)), self._last(FLAT_REWARD.metric, third)
        if not first or not last:
            return None
        chance = math.sqrt((variance(first) + variance(last)) / third)
        moved = fmean(last) - fmean(first)
        return f"{fmean(first):.3g}, {FLAT} steps later {fmean(last):.3g}" if abs(moved) <= 2 * chance else None

    def _alike(self, metrics: Mapping[str, float]) -> str | None:
        values = self._last(ALIKE.metric)
        return f"{fmean(values):.2f}" if values and fmean(values) >= 0.5 else None

    def _noisy(self, metrics: Mapping[str, float]) -> str | None:
        """Validation draws without noise. Further apart than the images of a prompt are: that is no chance."""
        scores = [value for name, value in metrics.items() if name.startswith("val-core/")]
        drawn, spread = metrics.get(NOISY.metric), metrics.get("critic/rewards/std_mean")
        if len(scores) != 1 or drawn is None or not spread or scores[0] - drawn <= spread:
            return None
        return f"{drawn:.3g}, validation's {scores[0]:.3g}"

    def _few(self, metrics: Mapping[str, float]) -> str | None:
        size = metrics.get(FEW.metric)
        return f"{size:g}" if size is not None and size < 4 else None

    def _stale(self, metrics: Mapping[str, float]) -> str | None:
        ages = self._last(STALE.metric)
        clipped = self._clips_more_than(0.5) if ages and fmean(ages) >= 1 else None
        return f"{fmean(ages):.2g}, {CLIPPED.metric} {clipped}" if clipped else None

    def _same(self, metrics: Mapping[str, float]) -> str | None:
        """Less than half as far apart as at first, while the reward rises."""
        steps = slice(STEPS) if len(self._seen) >= 2 * STEPS else slice(0)
        first, last = self._of(SAME.metric, steps), self._last(SAME.metric)
        before, after = self._of(FLAT_REWARD.metric, steps), self._last(FLAT_REWARD.metric)
        if not (first and last and before and after) or fmean(after) <= fmean(before):
            return None
        return f"{fmean(first):.2g} at first, now {fmean(last):.2g}" if fmean(last) < fmean(first) / 2 else None
