"""Knobs of the algorithm: where samples come from, how rewards become advantages, how old policies follow."""

from dataclasses import dataclass
from typing import Any

from verl_omni.config.knob import MOST_DENOISING, MOST_STEPS, MOST_TRIES, knob, names_in

DIRECT_PREFERENCE = "algorithm.trainer_type=direct_preference"


@dataclass
class RolloutCorrectionConfig:
    """Correction of a mismatch between the rollout's policy and the one that is trained."""

    rollout_is: str | None = knob(
        None,
        "importance weights for each `step` (verl: token) or `sequence` (all steps of a sample); null: none, but "
        "`step` where samples are stale and drawn in another arithmetic than training's",
        choices=names_in("verl_omni.algorithms.rollout_correction", "LEVELS"),
    )
    rollout_is_threshold: Any = knob(
        2.0,
        "weights are capped at this; those outside of [lower, upper] (verl: lower_upper) are 0",
        above=0,
        needs="algorithm.rollout_correction.rollout_is",
    )
    rollout_is_batch_normalize: bool = knob(
        False, "divide weights by their mean", needs="algorithm.rollout_correction.rollout_is"
    )
    rollout_rs: str | None = knob(
        None,
        "rejection: step_k1 (verl: token_k1), seq_sum_k2, seq_mean_k3, seq_max_k2, ... (several: separated by commas); "
        "null: none",
    )
    rollout_rs_threshold: Any | None = knob(
        None,
        "bounds of what is kept: an upper bound, or (k1) [lower, upper] (verl: lower_upper)",
        above=0,
        needs="algorithm.rollout_correction.rollout_rs",
    )
    bypass_mode: bool = knob(
        False,
        "take the rollout's own log-probabilities as the old ones; weights are then for the metrics alone",
    )


@dataclass
class FilterGroupsConfig:
    """DAPO's dynamic sampling: prompts whose images all have the same reward are replaced before the update."""

    enable: bool = knob(
        False,
        "drop prompts whose images all have the same reward, and draw the next prompts in their place",
        needs="algorithm.sample_source=online",
    )
    metric: str | None = knob(
        None,
        "what has to differ within a prompt: score (verl: seq_reward, seq_final_reward), or a number that the reward "
        "tells beside it; null: the rewards that advantages are made of",
        needs="algorithm.filter_groups.enable=true",
    )
    max_num_gen_batches: int = knob(
        10,
        "most batches that are drawn for a step, the first one included; what has no signal by then stays",
        least=2,
        most=MOST_TRIES,
        needs="algorithm.filter_groups.enable=true",
    )


@dataclass
class DiffusionAlgoConfig:
    trainer_type: str | None = knob(
        "policy_gradient",
        "how it trains; null: the algorithm's own way",
        choices=("policy_gradient", "direct_preference"),
    )
    sample_source: str = knob(
        "online", "online (rollout and rewards) or offline (samples from the data set)", choices=("online", "offline")
    )
    adv_estimator: str = knob("flow_grpo", "name of a registered advantage estimator or algorithm")
    norm_adv_by_std_in_grpo: bool | None = knob(True, "divide advantages by the standard deviation; false is Dr.GRPO")
    global_std: bool | None = knob(True, "that of the whole batch, not of the group")
    adv_std_ddof: int = knob(
        1, "the standard deviation divides by N minus this: 1 as torch.std, 0 as np.std and flow_grpo", least=0, most=1
    )
    reward_weights: dict[str, float] = knob(
        {},
        "gdpo, or your own estimator of several rewards: those to add up, as {name: weight}; names are keys of what "
        "the reward function returns; without any, those of reward.scorers",
    )
    old_policy_decay_schedule: str | None = knob(
        "copy",
        "how the old policy follows: copy, constant_0_9, linear_to_0_3, linear_to_0_5, delayed_linear_to_0_999",
        choices=names_in("verl_omni.algorithms.old_policy", "OLD_POLICY_DECAY_SCHEDULES"),
        needs=DIRECT_PREFERENCE,
    )
    old_policy_decay: float | None = knob(
        None,
        "decay of the old policy: old <- d * old + (1 - d) * new; null: by the schedule",
        least=0,
        most=1,
        needs=DIRECT_PREFERENCE,
    )
    old_policy_update_interval: int = knob(
        1, "training steps between two updates of the old policy", least=1, most=MOST_STEPS, needs=DIRECT_PREFERENCE
    )
    timestep_fraction: float | None = knob(
        1.0,
        "share of a rollout's steps that is trained, drawn at random (direct preference: so many noise levels)",
        above=0,
        most=1,
    )
    timesteps_per_sample: int | None = knob(
        None,
        "noise levels that a sample is trained at in one update; null: timestep_fraction",
        least=1,
        most=MOST_DENOISING,
        needs=DIRECT_PREFERENCE,
    )
    timestep_distribution: str | None = knob(
        "uniform",
        "noise levels are drawn uniform, logit_normal or from the rollout's own steps; or they are its last ones",
        choices=names_in("verl_omni.algorithms.forward_process", "SIGMA_DISTRIBUTIONS"),
        needs=DIRECT_PREFERENCE,
    )
    adv_mode: str = knob(
        "continuous",
        "advantages as they are (continuous), positive_only, negative_only, one_only or binary",
        choices=names_in("verl_omni.algorithms.advantages", "ADV_MODES"),
        needs=DIRECT_PREFERENCE,
    )
    paired_preference: bool | None = knob(
        False,
        "chosen/rejected stands for the rewards 1 and 0; false: the data set's own scores are needed",
        needs="algorithm.sample_source=offline",
    )
    filter_groups: FilterGroupsConfig = knob(FilterGroupsConfig, "")
    rollout_correction: RolloutCorrectionConfig = knob(RolloutCorrectionConfig, "")
