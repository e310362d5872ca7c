"""Before the first update the policy that trains is the one that sampled, and every ratio of the two is 1."""

from collections.abc import Mapping

import torch

from verl_omni.utils.errors import RunError

ROLLOUT_RATIO, ROLLOUT_RATIO_MEAN = "rollout_ratio_max_dev", "rollout_ratio_mean_dev"
# As a metric of the step: the ratios, and verl's distances of training from what drew.
COMPARED = {
    ROLLOUT_RATIO: f"actor/{ROLLOUT_RATIO}",
    ROLLOUT_RATIO_MEAN: f"actor/{ROLLOUT_RATIO_MEAN}",
    "rollout_kl": "rollout_corr/kl",
    "rollout_k3_kl": "rollout_corr/k3_kl",
}
# Where kernels round differently, as in bfloat16, single ratios scatter, the more the smaller the image: with four
# tokens, bfloat16 against float32, up to 0.19 off and 0.03 on average. There the mean counts: another formula moves it
# further.
ROUNDING = 100


def compare_with_rollout(
    model_output: Mapping[str, torch.Tensor], data: Mapping[str, torch.Tensor], distances: bool = False
) -> dict[str, torch.Tensor]:
    """How far a ratio of training to rollout is from 1, whatever the loss makes of them; `distances` too, if asked."""
    rolled_out = data.get("rollout_log_probs", data.get("old_log_probs"))  # the same, where none were computed again
    if "log_probs" not in model_output or rolled_out is None:
        return {}
    log_ratio = model_output["log_probs"].detach() - rolled_out
    ratio = log_ratio.exp()
    off = (ratio - 1).abs()
    found = {ROLLOUT_RATIO: off.max(), ROLLOUT_RATIO_MEAN: off.mean()}
    if distances:
        found |= {"rollout_kl": -log_ratio.mean(), "rollout_k3_kl": (ratio - 1 - log_ratio).mean()}
    return found


def check_first_ratio(metrics: Mapping[str, float], tolerance: float | None, other_kernels: bool) -> None:
    """Raise where a ratio (the loss's own, if there are no steps to compare) is off by more than rounding."""
    loosened = other_kernels and ROLLOUT_RATIO_MEAN in metrics
    off = metrics[ROLLOUT_RATIO_MEAN] if loosened else metrics.get(ROLLOUT_RATIO, metrics.get("ratio_max_dev"))
    if tolerance is None or off is None:
        return
    if off > tolerance * (ROUNDING if loosened else 1):
        raise RunError(
            f"before the first update {'the mean' if loosened else 'a'} ratio of training to rollout is off by "
            f"{off:.2g}, more than "
            f"actor_rollout_ref.actor.first_ratio_tolerance={tolerance:g}"
            f"{f' times {ROUNDING}, as their kernels differ' if loosened else ''}: the two compute different steps. "
            "Look at what the model's adapter overrides (forward_and_sample_previous_step, predict_velocity, "
            "build_scheduler), at rollout.algo.sde_type and noise_level, and at actor.engine.dtype, use_torch_compile "
            "and attention_backend; if kernels only round differently, set actor_rollout_ref.actor.old_log_probs=train"
        )
