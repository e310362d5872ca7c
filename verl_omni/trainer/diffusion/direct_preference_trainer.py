"""Direct preference: DPO, DiffusionNFT, AWM."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from verl.protocol import DataProto

from verl_omni.algorithms.forward_process import draw_sigmas, follows_old_policy, group_numbers, level_starts
from verl_omni.algorithms.old_policy import old_policy_decay
from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.settings import sized
from verl_omni.rewards.differentiable import reward_of_pixels
from verl_omni.rewards.reward_function import told_of
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
from verl_omni.trainer.diffusion.experience import Experience, new_experience
from verl_omni.trainer.diffusion.failed_rewards import scored_part
from verl_omni.trainer.diffusion.ordering import deal_units
from verl_omni.trainer.diffusion.teaching import check_rows_apart
from verl_omni.trainer.progress import timer
from verl_omni.utils.arrays import object_array
from verl_omni.workers import columns
from verl_omni.workers.engine.teachers import number_teachers
from verl_omni.workers.rollout.trajectories import COLUMN


class DirectPreferenceRayTrainer(BaseRayDiffusionTrainer):
    """DPO, DiffusionNFT, AWM: trains from final samples and rewards on single forward-process timesteps."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        self.loss_fn = self.loss_function.loss_fn
        actor = self.config.actor_rollout_ref.actor
        self.old_policy_follows = follows_old_policy(config.actor_rollout_ref.model.algorithm, actor)
        self.chained = self.loss_fn.chained_steps(actor)
        self.schedule = level_starts(rollout_sigmas(self.config.actor_rollout_ref.model), self.chained)
        self.follows_reward = "predicted_reward" in self.loss_fn.required_model_output_keys

    def fit(self) -> None:
        """Samples (a scored rollout, or cached pairs) -> the loss's tensors -> noise levels -> update -> old policy."""
        if self.follows_reward:
            self.actor_wg.follow_reward(functools.partial(reward_of_pixels, self.run.config.reward))
        super().fit()

    def learn(self, experience: Experience, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        if self.online:
            _, batch = scored_part(experience.scored(timing), self.global_step + 1)
            rewards = batch.batch["sample_level_rewards"]
        else:
            batch, rewards = experience.batch, experience.scores.batch["rm_scores"][:, 0]
        # What cached samples have beside their scores is theirs to declare, and so is what a loss makes of a batch.
        known = set(batch.batch.keys()) if self.online else {"score"}
        with timer(timing, "adv"):
            trained = self.loss_fn.prepare_actor_batch(batch, rewards, self.config)
        metrics = dict(trained.meta_info.get("metrics", {}))
        metrics["training/skipped_updates"] = float(len(trained) == 0)
        if len(trained):
            metrics |= self._update_on_noise_levels(trained, set(trained.batch.keys()) - known, timing)
        if self.old_policy_follows:
            metrics |= self._move_old_policy()
        return batch, metrics

    # ---- samples -------------------------------------------------------------------------------------

    def start_sampling(self, prompts: DataProto, step: int) -> Callable[[], Experience]:
        """Images by the ODE from the policy that the algorithm names, or the pairs of the data set themselves."""
        if not self.online:
            return lambda: self._cached_pairs(prompts)
        return super().start_sampling(prompts, step)

    def _cached_pairs(self, pairs: DataProto) -> Experience:
        """Chosen and rejected samples of the data set, adjacent; their order or their scores are the rewards."""
        uids = [f"{self.global_step}-{i // 2}" for i in range(len(pairs))]
        pairs.non_tensor_batch["uid"] = object_array(uids)
        paired = self.config.algorithm.paired_preference
        rewards = torch.tensor([1.0, 0.0]).repeat(len(pairs) // 2) if paired else pairs.batch["score"]
        scores = DataProto.from_dict({"rm_scores": rewards[:, None]})
        return Experience((new_experience(),), version=self.global_step, batch=pairs, collect=lambda: scores)

    # ---- update --------------------------------------------------------------------------------------

    def _update_on_noise_levels(self, batch: DataProto, asked: set[str], timing: dict[str, float]) -> dict[str, float]:
        """Optimizer steps over (sample, noise level) rows, the same ones whatever the number of ranks."""
        actor, size = self.config.actor_rollout_ref.actor, self.loss_fn.rows_per_unit
        if len(batch) % size:
            raise ValueError(
                f"{len(batch)} samples for a loss that takes {size} at a time: prepare_actor_batch must keep them whole"
            )
        units, group, told = len(batch) // size, None, None
        alike = torch.arange(len(batch)) // size  # rows with one number are noised alike
        if self.loss_fn.by_group:
            alike = group = batch.batch["group"] = group_numbers(batch.non_tensor_batch["uid"])
        if self.follows_reward:
            told = number_told(batch)
        if self.loss_function.needs_teacher:
            batch = number_teachers(batch, actor.teacher.path)
        _, first = np.unique(alike, return_index=True)
        sizes = [tuple(row) for row in batch.batch["size"][first].tolist()] if "size" in batch.batch.keys() else None
        levels = self._noise_levels(len(first), sizes)
        batch.batch.update({k: v[alike] for k, v in levels.items()})
        kept = columns.for_training(batch.batch.keys(), asked)
        references = [COLUMN] if COLUMN in batch.non_tensor_batch else []
        whole = columns.note_mixed(batch.select(batch_keys=kept, non_tensor_batch_keys=references))
        if self.teachers is not None:
            with timer(timing, "teacher"):
                check_rows_apart(whole)
                dealt, rows = self._dealt(whole, units, group, self.teachers.ranks)
                whole.non_tensor_batch[COLUMN] = whole.non_tensor_batch[COLUMN].copy()  # the samples' own stays
                whole.non_tensor_batch[COLUMN][rows] = self.teachers.ask(dealt)
        dealt, rows = self._dealt(whole, units, group, self.layout.data)
        if told is not None:
            dealt.meta_info["told"] = told
        if self.pace.overlaps:  # the weights have moved on since they drew these samples
            versions = [int(version) for version in batch.non_tensor_batch["version"]]
            dealt.batch["drawn_by"] = torch.tensor(versions)[rows]
            dealt.meta_info |= {"stale": True, "versions": sorted(set(versions))}
        with timer(timing, "update_actor"):
            return self.actor_wg.update_actor(dealt)[0]

    def _dealt(
        self, batch: DataProto, units: int, group: torch.Tensor | None, ranks: int
    ) -> tuple[DataProto, torch.Tensor]:
        """(the rows of each of so many ranks, one after the other; which of the batch they are)."""
        actor, size = self.config.actor_rollout_ref.actor, self.loss_fn.rows_per_unit
        order, share, sizes = deal_units(
            units,
            mini_batches=self.config.data.train_batch_size // actor.ppo_mini_batch_size,
            ranks=ranks,
            seed=self._seed("mini-batches") if actor.shuffle else None,
            group=group,
        )
        rows = (order[:, None] * size + torch.arange(size)).reshape(-1)
        dealt = batch[rows]
        dealt.batch["share"] = (share / size).repeat_interleave(size)
        dealt.meta_info = {
            "num_mini_batches": len(sizes),
            "mini_batch_rows": [n * size for n in sizes],
            "epochs": actor.ppo_epochs,
        }
        return dealt, rows

    def _noise_levels(self, units: int, sizes: list[tuple] | None) -> dict[str, torch.Tensor]:
        """Noise levels, and the seeds of the noise, of this step: they depend on seed, step and unit alone.

        A unit whose samples have a size of their own has that size's schedule.
        """
        algorithm = self.config.algorithm
        generator = torch.Generator().manual_seed(self._seed("noise levels"))
        count = algorithm.timesteps_per_sample or max(
            1, math.ceil(len(self.schedule) * algorithm.timestep_fraction - 1e-9)
        )
        begin, sigma = generator.get_state(), None
        for own in dict.fromkeys(sizes or [None]):
            generator.set_state(begin)
            schedule = self._schedule_of(own)
            drawn = draw_sigmas(units, count, algorithm.timestep_distribution, generator, schedule)
            if sigma is None:
                sigma = drawn
            else:
                rows = torch.tensor([other == own for other in sizes])
                sigma[rows] = drawn[rows]
        return {"sigma": sigma, "noise_seed": torch.randint(2**62, (units, count), generator=generator)}

    @functools.lru_cache(maxsize=256)  # noqa: B019  (a trainer lives as long as its process)
    def _schedule_of(self, size: tuple[int, int, int] | None) -> torch.Tensor:
        """The noise levels at which the rollout's steps start for samples of this size; None: of the run's own."""
        if size is None:
            return self.schedule
        return level_starts(rollout_sigmas(sized(self.config.actor_rollout_ref.model, size)), self.chained)

    def _move_old_policy(self) -> dict[str, float]:
        algorithm, step = self.config.algorithm, self.global_step + 1
        if step % algorithm.old_policy_update_interval:
            return {}
        decay = old_policy_decay(step, algorithm.old_policy_decay_schedule, algorithm.old_policy_decay)
        self.actor_wg.update_old_policy(decay)
        return {"training/old_policy_decay": decay}


def number_told(batch: DataProto) -> list[dict[str, Any]]:
    """What a reward is told of each prompt, and its number on the rows of the prompt's images."""
    numbers = batch.batch["told"] = group_numbers(batch.non_tensor_batch["uid"])
    firsts = np.unique(numbers, return_index=True)[1].tolist()
    return [told_of({name: column[row] for name, column in batch.non_tensor_batch.items()}) for row in firsts]


def rollout_sigmas(model: DiffusionModelConfig) -> torch.Tensor:
    """The noise levels at which the rollout's steps start."""
    adapter = DiffusionModelBase.get_class(model)
    scheduler = adapter.build_scheduler(model)
    adapter.set_timesteps(scheduler, model, "cpu")
    return scheduler.sigmas[: len(scheduler.timesteps)]
