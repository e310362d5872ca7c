"""From prompts to samples: what is asked of the engines for a training step or a validation, and what comes back."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from verl.protocol import DataProto

from verl_omni.agent_loop.outputs import side_by_side
from verl_omni.pipelines.settings import validation_sampling
from verl_omni.rewards.validation import COLUMN as VALIDATES
from verl_omni.rewards.validation import has_own
from verl_omni.trainer.diffusion.experience import Experience, new_experience, places
from verl_omni.trainer.diffusion.filter_groups import GroupFilter, start_filtered
from verl_omni.trainer.diffusion.group_queue import Group
from verl_omni.trainer.diffusion.pace import DrawnGroup
from verl_omni.trainer.diffusion.pool import asked_of, chosen_seeds, in_precision
from verl_omni.trainer.diffusion.rollouts import Weights
from verl_omni.trainer.diffusion.validation import training_folder, validation_metrics, write_samples
from verl_omni.trainer.progress import first_images
from verl_omni.trainer.run_folder.saving import is_due
from verl_omni.utils.arrays import object_array
from verl_omni.utils.seeds import derive_seed, derive_seeds
from verl_omni.workers.rollout.trajectories import COLUMN


class Sampling:
    """The part of a trainer that draws. It knows of the loss only what that declares to need."""

    @property
    def num_servers(self) -> int:
        return len(self.rollouts.servers)

    @functools.cached_property
    def group_filter(self) -> GroupFilter | None:
        return GroupFilter(self.config) if self.config.algorithm.filter_groups.enable else None

    def start_sampling(self, prompts: DataProto, step: int) -> Callable[[], Experience]:
        """Begin to draw samples for the training step after `step` others; what comes back waits for them."""
        if self.group_filter is not None:
            return start_filtered(self, prompts, step)
        batch, metrics = self._exact_requests(prompts, step, range(len(prompts)), step == self.global_step)
        names = self._place(batch, self._ranks(len(batch), step))
        drawn, version = self._draw(batch, self.algorithm.rollout_policy), self.global_step

        def wait() -> Experience:
            experience = self.experience(names, version, step, *drawn())
            experience.metrics = metrics
            return experience

        return wait

    def _exact_requests(
        self, prompts: DataProto, step: int, groups: Sequence[int], learns: bool
    ) -> tuple[DataProto, dict[str, float]]:
        """`requests`, and metrics. Where there is a pool, it is drawn now and says which seeds are worth it."""
        if self.config.actor_rollout_ref.rollout.pool.size is None:
            return self.requests(prompts, step, groups, learns), {}
        seeds, metrics = chosen_seeds(self, prompts, step, groups)
        batch = self.requests(prompts, step, groups, learns)
        batch.non_tensor_batch["seed"] = object_array([seed for own in seeds for seed in own])
        return batch, metrics

    def start_groups(
        self,
        prompts: DataProto,
        step: int,
        numbers: Sequence[int],
        places: Sequence[int],
        count: int,
        learns: bool,
    ) -> Callable[[], list[Group]]:
        """Begin to draw groups of these numbers, for these places among the `count` of a step; waits for scores too."""
        batch, n = self.requests(prompts, step, numbers, learns), self.config.actor_rollout_ref.rollout.n
        rows = [list(range(place * n, (place + 1) * n)) for place in range(count)]
        ranks = self._ranks(count * n, step)
        names = self._place(batch, None if ranks is None else [ranks[i] for place in places for i in rows[place]], n)
        drawn, version = self._draw(batch, self.algorithm.rollout_policy), self.global_step

        def groups() -> list[Group]:
            output, collect = drawn()
            scores = collect()
            told = zip(numbers, names, rows, strict=False)
            return [Group(number, version, tuple(numbers), name, output[i], scores[i]) for number, name, i in told]

        return groups

    def requests(self, prompts: DataProto, step: int, groups: Sequence[int], learns: bool) -> DataProto:
        """What to draw of these prompts: the groups of those numbers among all of `step`, `rollout.n` samples each.

        `learns`: the weights that draw are those that will learn.
        """
        return self._training_requests(prompts, {}, step, groups)

    def experience(
        self, names: tuple[str, ...], version: int, step: int, output: DataProto, scores: Callable[[], DataProto]
    ) -> Experience:
        """Samples of whole groups, and what waits for their scores, for the training step after `step` others."""
        return Experience(names, version, output, scores)

    def publish(self) -> Weights:
        """The weights as they are now, for servers to draw with."""
        return self.rollouts.publish(self.algorithm.rollout_policy, self.global_step)

    async def draw_groups(
        self,
        server: int,
        prompts: DataProto,
        step: int,
        groups: Sequence[int],
        newest: Callable[[], Weights],
        learns: bool,
    ) -> tuple[int, list[DrawnGroup]]:
        """One server begins with these groups of a step: (the version of the weights that draw, the groups)."""
        n = self.config.actor_rollout_ref.rollout.n
        batch, names = self.requests(prompts, step, groups, learns), [new_experience() for _ in groups]
        batch.non_tensor_batch["server"] = object_array([server] * len(batch))
        batch.non_tensor_batch["place"] = object_array([p for name in names for p in places(name, n, ship=True)])
        version = (await self.rollouts.ready(server, newest)).version
        begun = self.agent_loop_manager.start_groups(batch, n)
        return version, [DrawnGroup(name, *group) for name, group in zip(names, begun, strict=True)]

    def release(self, experience: Experience, batch: DataProto) -> None:
        """It has been learned from: nobody asks for its trajectories again."""
        self.actor_wg.release(experience.names)
        batch.non_tensor_batch.pop(COLUMN, None)  # what Ray stores goes with the last reference

    def validate(self) -> dict[str, float]:
        """Score the validation prompts with the same seeds every time, and keep the samples."""
        rollout = self.config.actor_rollout_ref.rollout
        val, sampling = rollout.val_kwargs, validation_sampling(rollout, self.config.actor_rollout_ref.model)
        sampling |= asked_of(self.config.reward, shown=True)
        policy = "ema" if self.config.actor_rollout_ref.actor.ema_decay else "current"
        folder, limit = self.run_dir / "validation" / f"step_{self.global_step}", self.config.trainer.log_val_images
        outputs, start = [], 0
        for rows in self.val_loader:
            batch = DataProto.from_single_dict(rows)
            seeds = range(val.seed + start, val.seed + start + len(batch) * val.n)  # as a user counts them
            batch = self._rollout_batch(batch, val.n, seeds, sampling, self.global_step)
            batch.meta_info["scores_only"] = True  # who draws the images writes them
            if has_own(self.config):
                batch.non_tensor_batch[VALIDATES] = object_array([True] * len(batch))
            files = {i: str(folder / f"{start + i:05d}") for i in range(len(batch)) if limit < 0 or start + i < limit}
            start += len(seeds)
            output, scores = self._draw(batch, policy, files)()
            outputs.append(side_by_side(output, scores()))
            outputs[-1].meta_info = {}  # times, which differ; verl joins only what is equal
        joined = DataProto.concat(outputs)
        write_samples(joined, folder)
        return validation_metrics(joined, val.n)

    def _seed(self, purpose: str, step: int | None = None) -> int:
        """What the trainer draws at this step, or at another: a seed for each purpose."""
        return derive_seed(self.config.trainer.seed, purpose, self.global_step if step is None else step)

    def _ranks(self, samples: int, step: int) -> list[int] | None:
        """The rank that will train on each sample; None where that is not known before rewards are."""
        return None

    def _rollout_batch(
        self,
        batch: DataProto,
        n: int,
        seeds: Sequence[int],
        sampling: dict[str, Any],
        step: int,
        groups: Sequence[int] | None = None,
    ) -> DataProto:
        """`n` requests a prompt, each with its seed."""
        groups = range(len(batch)) if groups is None else groups
        batch.non_tensor_batch["uid"] = object_array([f"{step}-{group}" for group in groups])
        batch = batch.repeat(repeat_times=n, interleave=True)
        batch.non_tensor_batch["seed"] = object_array(list(seeds))
        batch.meta_info["sampling_params"] = sampling
        return batch

    def _training_requests(
        self, prompts: DataProto, sampling: dict[str, Any], step: int, groups: Sequence[int] | None = None
    ) -> DataProto:
        """`rollout.n` requests a prompt with the rollout's settings, each with a seed of its own.

        Seeds depend on the step and on the number of the group alone, not on what is drawn beside it.
        """
        rollout = self.config.actor_rollout_ref.rollout
        n, groups = rollout.n, range(len(prompts)) if groups is None else groups
        seeds = derive_seeds(rollout.seed, "rollout", step, count=(max(groups) + 1) * n)
        sampling = dataclasses.asdict(rollout.pipeline) | {
            "noise_level": rollout.algo.noise_level,
            "sde_type": rollout.algo.sde_type,
            "keep_trajectory": True,
            **in_precision(rollout.precision),
            **asked_of(self.config.reward, shown=False),
            **sampling,
        }
        own = [seeds[group * n + i] for group in groups for i in range(n)]
        batch = self._rollout_batch(prompts, n, own, sampling, step, groups)
        batch.meta_info["scores_only"] = True  # nobody looks at the pixels: the model learns from latents
        batch.meta_info["compares"] = self.config.reward.pairwise.by is not None
        keep_to = [self._keep_to(step, group) for group in groups for _ in range(n)]
        batch.non_tensor_batch["keep_to"] = object_array(keep_to)
        if rollout.algo.same_initial_noise:
            starts = derive_seeds(rollout.seed, "initial noise", step, count=max(groups) + 1)
            batch.non_tensor_batch["init_seed"] = object_array([starts[group] for group in groups for _ in range(n)])
        return batch

    def _keep_to(self, step: int, group: int) -> str | None:
        """Where the best and the worst image of a group are kept: of some prompts, where the report shows them."""
        trainer, number = self.config.trainer, step + 1
        due = number == 1 or is_due(number, trainer.test_freq, number == self.total_steps)
        decoded = self.config.reward.input == "decoded"  # else there is no picture of it
        if not due or not decoded or group >= trainer.log_train_groups:
            return None
        return str(training_folder(self.run_dir, number) / f"{group:05d}")

    def _place(self, batch: DataProto, ranks: list[int] | None = None, size: int | None = None) -> tuple[str, ...]:
        """Say which engine draws each sample and where its trajectory is left; the name of the new experience, or one
        for each `size` samples."""
        servers, ship = self.rollouts.places(ranks, len(batch))
        size = size or len(batch)
        names = tuple(new_experience() for _ in range(0, len(batch), size))
        batch.non_tensor_batch["server"] = object_array(servers)
        batch.non_tensor_batch["place"] = object_array([p for name in names for p in places(name, size, ship)])
        return names

    def _draw(
        self, batch: DataProto, policy: str, images_to: dict[int, str] | None = None
    ) -> Callable[[], tuple[DataProto, Callable[[], DataProto]]]:
        """Begin to draw with the weights as they are now; what comes back waits for (samples, what waits for rewards).

        Rewards go on while the model does other work.
        """
        precision = batch.meta_info["sampling_params"].get("precision")
        self.rollouts.begin(policy, self.global_step, precision)
        start, wait = perf_counter(), self.agent_loop_manager.start_images(batch, images_to)

        def drawn() -> tuple[DataProto, Callable[[], DataProto]]:
            output, collect = wait()
            first_images(self.rollouts.compiling_seconds)
            self.rollouts.end()
            end = start + output.meta_info["timing"]["images"]
            for server in sorted(set(batch.non_tensor_batch["server"])):
                self.timeline.add(f"rollout {server}", "drawing", start, end)

            def scores() -> DataProto:
                result = collect()
                self.timeline.add("rewards", "scoring", end, end + result.meta_info["timing"]["rewards"])
                return self.scored_rows(batch, result)

            return output, scores

        return drawn

    def scored_rows(self, batch: DataProto, result: DataProto) -> DataProto:
        """The scores of requests beside what was asked; rewards that nobody has computed by now are."""
        if "rm_scores" not in result.batch.keys():
            pixels = "responses" in result.batch.keys()
            made = (result.batch if pixels else result.non_tensor_batch)["responses"]
            columns = dict(batch.non_tensor_batch) | ({} if pixels else {"responses": made})
            tensors = {"responses": made} if pixels else {"sample": torch.arange(len(batch))}
            scored = DataProto.from_dict(tensors, columns)
            result = result.union(self.reward_loop_manager.compute_rm_score(scored))
        result.non_tensor_batch = {**batch.non_tensor_batch, **result.non_tensor_batch}
        return result
