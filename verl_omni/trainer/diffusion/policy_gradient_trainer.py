"""Policy gradient: FlowGRPO and its relatives."""

import dataclasses
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto

from verl_omni.algorithms.registry import estimate_advantages
from verl_omni.pipelines.schedulers.windows import sde_window
from verl_omni.trainer.config.algorithm import DiffusionAlgoConfig
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer, timer
from verl_omni.trainer.diffusion.ordering import train_steps
from verl_omni.utils.arrays import object_array

# A sample's seed is a number of its own in each of these spaces, so that no two draws ever share one.
SEEDS_PER_STEP = 1_000_000


class PolicyGradientRayTrainer(BaseRayDiffusionTrainer):
    """FlowGRPO and its relatives: roll out with noise, score, compare within the group, update on the stored steps."""

    def fit(self) -> None:
        """rollout and reward -> (old log-probabilities) -> (reference) -> advantage -> update, for every batch."""
        super().fit()

    def training_step(self, rows: dict[str, Any], timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        with timer(timing, "gen"):
            batch = self._rollout(DataProto.from_single_dict(rows))
        keys = self.loss_function.loss_fn.data_keys(self.settings.actor_rollout_ref.actor)
        # The embedded engine samples with the policy itself: its log-probabilities are the old ones.
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        if self.loss_function.needs_reference:
            with timer(timing, "ref"):
                batch = batch.union(self.actor_wg.compute_ref_log_prob(self._for_training(batch)))
        with timer(timing, "adv"):
            algorithm = self.config.algorithm
            batch.batch["sample_level_rewards"] = batch.batch["rm_scores"][:, 0]
            batch = compute_advantage(
                batch,
                algorithm.adv_estimator,
                algorithm.norm_adv_by_std_in_grpo,
                algorithm.global_std,
                self.settings.algorithm,
            )
        if self.settings.algorithm.timestep_fraction < 1:
            batch.batch["train_steps"] = train_steps(
                batch.batch["all_timesteps"].shape,
                self.settings.algorithm.timestep_fraction,
                seed=self.config.trainer.seed + self.global_step,
            )
        with timer(timing, "update_actor"):
            metrics = self._update_actor(self._for_training(batch, keys), self.config.actor_rollout_ref.rollout.n)
        return batch, metrics

    def _rollout(self, prompts: DataProto) -> DataProto:
        rollout = self.settings.actor_rollout_ref.rollout
        algo, steps = rollout.algo, rollout.pipeline.num_inference_steps
        sampling = dataclasses.asdict(rollout.pipeline) | {
            "noise_level": algo.noise_level,
            "sde_type": algo.sde_type,
            "keep_trajectory": True,
            "keep_means": "old_prev_sample_mean"
            in self.loss_function.loss_fn.data_keys(self.settings.actor_rollout_ref.actor),
        }
        first = rollout.seed * SEEDS_PER_STEP * 1000 + (self.global_step + 1) * SEEDS_PER_STEP
        groups = len(prompts)
        batch = self._rollout_batch(prompts, rollout.n, first + np.arange(groups * rollout.n), sampling)
        windows = [sde_window(algo, steps, self.global_step, rollout.seed, group) for group in range(groups)]
        batch.non_tensor_batch["sde_window"] = object_array(
            [(w.start, w.stop) for w in windows for _ in range(rollout.n)]
        )
        if algo.same_initial_noise:
            start = first + groups * rollout.n
            batch.non_tensor_batch["init_seed"] = object_array(
                [start + group for group in range(groups) for _ in range(rollout.n)]
            )
        return self._generate(batch, self.algorithm.rollout_policy)

    def _for_training(self, batch: DataProto, keys: tuple[str, ...] = ()) -> DataProto:
        """Only the tensors that the workers need: no images, no second copy of anything."""
        drop = {"responses", "rm_scores", "rollout_log_probs", "final_latents", "sample_level_rewards", "returns"}
        chosen = [k for k in batch.batch.keys() if k not in drop or k in keys]
        return batch.select(batch_keys=chosen, non_tensor_batch_keys=[])


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: DiffusionAlgoConfig | None = None,
) -> DataProto:
    """Add `advantages` and `returns` (B, W): one advantage an image, the same for each of its trained steps."""
    components = {
        k: torch.tensor(np.asarray(data.non_tensor_batch[k], dtype=np.float32))
        for k in data.meta_info.get("reward_components", [])
    }
    advantages, returns = estimate_advantages(
        adv_estimator,
        sample_level_rewards=data.batch["sample_level_rewards"],
        index=data.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        global_std=global_std,
        config=config,
        **({"sample_level_reward_components": components} if components else {}),
    )
    steps = data.batch["all_timesteps"].shape[1] if "all_timesteps" in data.batch.keys() else 1
    for name, value in (("advantages", advantages), ("returns", returns)):
        data.batch[name] = value.reshape(len(value), -1).expand(-1, steps).contiguous()
    return data
