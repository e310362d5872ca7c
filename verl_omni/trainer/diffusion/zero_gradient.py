"""A step whose gradient is exactly 0 for every weight teaches nothing: it says so, and several in a row end the run."""

from collections.abc import Mapping

from verl_omni.report.notices import notice
from verl_omni.trainer.callbacks import Callback, Run, Step
from verl_omni.utils.errors import RunError

MOST_IN_A_ROW = 5


class ZeroGradients(Callback):
    """Counts them. A resumed run counts anew."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def on_step_end(self, run: Run, step: Step) -> None:
        metrics, number = step.metrics, step.number
        norms = [metrics[name] for name in ("actor/grad_norm", "actor/rewriter/grad_norm") if name in metrics]
        without = (norms and not any(norms)) or metrics.get("training/skipped_updates") == 1.0
        self.in_a_row = self.in_a_row + 1 if without else 0
        if without:
            said = f"the gradient is 0 for every weight, nothing is learned ({self.in_a_row} in a row, "
            notice(run.folder, f"{said}{MOST_IN_A_ROW} end the run): {likely_cause(metrics)}", number)
        if self.in_a_row >= MOST_IN_A_ROW:
            step.last, step.end = True, RunError(
                f"the gradient was 0 for every weight from step {number - self.in_a_row + 1} to {number}, nothing is "
                f"learned: {likely_cause(metrics)}"
            )


def likely_cause(metrics: Mapping[str, float]) -> str:
    """What a person should look at, by what the step itself shows."""
    if metrics.get("critic/rewards/zero_std_ratio") == 1.0:
        return (
            "the images of each prompt all have the same reward; look at the reward function, at "
            "actor_rollout_ref.rollout.n, and at whether the task is solved"
        )
    if metrics.get("rollout_corr/rollout_rs_masked_fraction") == 1.0:
        return (
            "every step is rejected; look at algorithm.rollout_correction.rollout_rs_threshold, and at rollout_corr/kl "
            "for how far training is from the rollout"
        )
    if metrics.get("training/skipped_updates"):
        return "there was no pair to learn from; look at the rewards"
    return (
        "rewards are not the reason; look at actor_rollout_ref.rollout.algo.noise_level and sde_type, and at "
        "actor_rollout_ref.actor.diffusion_loss (adv_clip_max, clip_ratio, and what else the loss can make 0)"
    )
