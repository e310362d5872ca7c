"""Policy gradient: FlowGRPO and its relatives."""

from collections.abc import Callable, Sequence

import torch
from verl.protocol import DataProto

from verl_omni.algorithms.advantages import weighted_rewards
from verl_omni.algorithms.registry import estimate_advantages
from verl_omni.algorithms.rollout_correction import correct, is_on, weighs
from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.schedulers.windows import sde_window
from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.failed_rewards import scored_part
from verl_omni.trainer.diffusion.gaps import with_gaps
from verl_omni.trainer.diffusion.ordering import minibatch_order, train_steps
from verl_omni.trainer.progress import timer
from verl_omni.utils.arrays import object_array
from verl_omni.utils.seeds import derive_seeds
from verl_omni.workers import columns
from verl_omni.workers.engine.teachers import number_teachers
from verl_omni.workers.rollout.trajectories import COLUMN


class PolicyGradientRayTrainer(BaseRayDiffusionTrainer):
    """FlowGRPO and its relatives: roll out with noise, score, compare within the group, update on the stored steps."""

    def fit(self) -> None:
        """rollout -> (reference, while rewards are computed) -> rewards -> advantage -> update, for every batch."""
        super().fit()

    def learn(self, experience: Experience, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        keys = self.loss_function.loss_fn.data_keys(self.config.actor_rollout_ref.actor)
        batch = experience.batch
        batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        recomputes = self.config.actor_rollout_ref.actor.old_log_probs == "recompute"
        compares = recomputes or is_on(self.config.algorithm.rollout_correction)
        if self.loss_function.needs_reference:
            with timer(timing, "ref"):
                batch = experience.batch = batch.union(self.actor_wg.compute_ref_log_prob(self._for_training(batch)))
        if compares:
            with timer(timing, "old_log_prob"):
                recomputed = self.actor_wg.compute_log_prob(self._for_training(batch))
            batch.batch["old_log_probs"] = recomputed.batch["old_log_probs"]
        if recomputes:
            keys = (*keys, "rollout_log_probs")  # to be compared with, still
        batch = experience.scored(timing)
        if self.loss_function.needs_teacher:
            with timer(timing, "teacher"):
                batch = self._taught(batch)
        whole = batch
        scored, batch = scored_part(whole, self.global_step + 1)
        kept = scored[:, None].expand(whole.batch["all_timesteps"].shape).clone()
        metrics = self._correct(whole, batch, scored, kept) if compares else {}
        with timer(timing, "adv"):
            algorithm = self.config.algorithm
            batch = compute_advantage(
                batch,
                algorithm.adv_estimator,
                algorithm.norm_adv_by_std_in_grpo,
                algorithm.global_std,
                self.config.algorithm,
            )
        if self.config.algorithm.timestep_fraction < 1:
            drawn = train_steps(kept.shape, self.config.algorithm.timestep_fraction, seed=self._seed("trained steps"))
            # By sample, not by row: the order of rows depends on the number of ranks, the update must not.
            whole.batch["train_steps"] = drawn[whole.batch["sample_id"]]
            kept = kept.gather(1, whole.batch["train_steps"])
        trained, minis = whole, self._mini_batches(len(whole))
        if not kept.all():
            trained, minis = with_gaps(whole, batch, scored, kept, minis, self.layout.data)
        if not minis:
            return batch, metrics | {"training/skipped_updates": 1.0}
        with timer(timing, "update_actor"):
            stale = experience.version != self.global_step
            updated = self._update_actor(self._for_training(trained, keys), minis, stale)
        return batch, updated | metrics

    def _taught(self, batch: DataProto) -> DataProto:
        """With the means of each row's teacher, that of its data_source."""
        rows = self._for_training(number_teachers(batch, self.config.actor_rollout_ref.actor.teacher.path))
        batch.batch.pop("teacher")
        if self.teachers is None:
            return batch.union(self.actor_wg.compute_teacher_means(rows))
        batch.non_tensor_batch[COLUMN] = self.teachers.ask(rows)
        return batch

    def _correct(
        self, whole: DataProto, batch: DataProto, scored: torch.Tensor, kept: torch.Tensor
    ) -> dict[str, float]:
        """Weigh the steps of `batch`, the scored rows of `whole`, and take those that are rejected out of `kept`."""
        config, own = self.config.algorithm.rollout_correction, whole.batch["rollout_log_probs"]
        found = correct(batch.batch["old_log_probs"], batch.batch["rollout_log_probs"], config)
        kept[scored] = found.kept
        if weighs(config):
            batch.batch["rollout_is_weights"] = found.weights
        if config.bypass_mode:  # of what is left out any will do: one far off would be an infinite ratio
            whole.batch["old_log_probs"] = torch.where(kept, own, whole.batch["old_log_probs"])
        return found.metrics

    @property
    def _guided(self) -> bool:
        model = self.config.actor_rollout_ref.model
        return DiffusionModelBase.get_class(model).cfg_scale(model) > 1

    def requests(self, prompts: DataProto, step: int, groups: Sequence[int], learns: bool) -> DataProto:
        """With a window of stochastic steps for each."""
        arr = self.config.actor_rollout_ref
        rollout, actor, model, ref = arr.rollout, arr.actor, arr.model, arr.ref
        in_full = self.loss_function.compares_in_full(rollout.precision, ref.precision)
        keep = {
            # of the weights that draw: of no use to others
            "keep_uncond": self._guided and actor.reuse_uncond and learns and not in_full,
            "keep_means": self.loss_function.keeps_means(ref.precision),
        }
        batch = self._training_requests(prompts, keep, step, groups)
        steps = DiffusionModelBase.get_class(model).num_steps(model)
        size = rollout.algo.branches or rollout.n
        states = [group * (rollout.n // size) + i for group in groups for i in range(rollout.n // size)]
        windows = [sde_window(rollout.algo, steps, step, rollout.seed, state) for state in states]
        batch.non_tensor_batch["sde_window"] = object_array([(w.start, w.stop) for w in windows for _ in range(size)])
        if rollout.algo.branches:
            self._branch(batch, step, states, size)
        return batch

    def _branch(self, batch: DataProto, step: int, states: Sequence[int], size: int) -> None:
        """Each `size` samples walk together to their window, from one noise, and are compared with each other alone."""
        rollout, columns_of = self.config.actor_rollout_ref.rollout, batch.non_tensor_batch
        each = rollout.n // size
        names = [f"{uid}/{i // size % each}" for i, uid in enumerate(columns_of["uid"])]
        columns_of["uid"] = columns_of["branch"] = object_array(names)
        if not rollout.algo.same_initial_noise:
            starts = derive_seeds(rollout.seed, "state of branches", step, count=max(states) + 1)
            columns_of["init_seed"] = object_array([starts[state] for state in states for _ in range(size)])

    def experience(
        self, names: tuple[str, ...], version: int, step: int, output: DataProto, scores: Callable[[], DataProto]
    ) -> Experience:
        """Trajectories in training order."""
        order = self._training_order(len(output), self.config.actor_rollout_ref.rollout.n, step)
        output.batch["sample_id"] = torch.arange(len(output))
        collect = lambda: scores().select(batch_keys=["rm_scores"])[order]  # noqa: E731
        return Experience(names, version, output[order], collect)

    def _ranks(self, samples: int, step: int) -> list[int]:
        order = self._training_order(samples, self.config.actor_rollout_ref.rollout.n, step)
        ranks = torch.empty(samples, dtype=torch.long)
        ranks[order] = torch.tensor(self.layout.ranks_of_rows(samples))
        return ranks.tolist()

    def _training_order(self, rows: int, samples_per_prompt: int, step: int) -> torch.Tensor:
        """Row order of a step's update: the same mini-batches whatever the number of ranks."""
        actor = self.config.actor_rollout_ref.actor
        return minibatch_order(
            rows // samples_per_prompt,
            samples_per_prompt,
            self._mini_batches(rows),
            self.layout.data,
            seed=self._seed("mini-batches", step) if actor.shuffle else None,
        )

    def _mini_batches(self, rows: int) -> int:
        """Optimizer steps over so many samples."""
        arr = self.config.actor_rollout_ref
        return rows // (arr.actor.ppo_mini_batch_size * arr.rollout.n)

    def _update_actor(self, batch: DataProto, mini_batches: int, stale: bool) -> dict[str, float]:
        """Optimizer steps over a batch that is in training order; `stale`: earlier weights drew it."""
        epochs = self.config.actor_rollout_ref.actor.ppo_epochs
        batch.meta_info = {"num_mini_batches": mini_batches, "epochs": epochs, "stale": stale}
        return self.actor_wg.update_actor(batch)[0]

    def _for_training(self, batch: DataProto, keys: tuple[str, ...] = ()) -> DataProto:
        """Only the tensors that the workers need: no images, no second copy of anything."""
        chosen = columns.for_training(batch.batch.keys(), keys)
        return columns.note_mixed(batch.select(batch_keys=chosen, non_tensor_batch_keys=[COLUMN]))


def compute_advantage(
    data: DataProto,
    adv_estimator: str,
    norm_adv_by_std_in_grpo: bool = True,
    global_std: bool = True,
    config: DiffusionAlgoConfig | None = None,
) -> DataProto:
    """Add `advantages` and `returns` (B, W): one advantage an image, the same for each of its trained steps."""
    rewards = data.batch["sample_level_rewards"]
    advantages, returns = estimate_advantages(
        adv_estimator,
        sample_level_rewards=rewards,
        index=data.non_tensor_batch["uid"],
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        global_std=global_std,
        config=config,
        **(weighted_rewards(data, rewards, config.reward_weights) if config is not None else {}),
    )
    steps = data.batch["all_timesteps"].shape[1] if "all_timesteps" in data.batch.keys() else 1
    for name, value in (("advantages", advantages), ("returns", returns)):
        data.batch[name] = value.reshape(len(value), -1).expand(-1, steps).contiguous()
    return data
