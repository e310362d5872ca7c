"""What a forward of direct preference computes: velocities at single noise levels of the forward process."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from verl_omni.algorithms.base import column
from verl_omni.algorithms.forward_process import TEACHER, noised, predicted_clean
from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.sampling import transformer_inputs
from verl_omni.pipelines.schedulers.flow_match_sde import own_levels
from verl_omni.utils.errors import RunError
from verl_omni.workers.columns import stacked
from verl_omni.workers.engine.policies import policy_at
from verl_omni.workers.engine.replay import Batch, Replay
from verl_omni.workers.engine.teachers import kept_teachers

NO_GRADIENT = (
    "the reward of a predicted image has no gradient, which actor_rollout_ref.model.algorithm=draft follows: take "
    ".detach(), torch.no_grad, .item() and numpy out of it"
)


class NoiseLevels(Replay):
    """The velocity of noised clean latents, without guidance; and the reward of what it says that they are."""

    per = "level"
    outputs = frozenset({"velocity", "predicted_reward"})
    #: clean latents, how they were drawn, what a reward is told of each -> rewards (N,), with a gradient; where a loss
    #: asks for `predicted_reward`
    reward_of: Callable[[torch.Tensor, DiffusionModelConfig, list[Any]], torch.Tensor] | None = None
    #: what a reward is told of a prompt's images, by the numbers in the column of this name
    told: Sequence[Any] = ()
    #: how many steps of the rollout lead from a noise level to what is scored; the last of them ends in the image
    chained = 1

    def configured(self, model_config: DiffusionModelConfig) -> DiffusionModelConfig:
        return self.adapter.unguided(model_config)

    def pairs(self, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples of one unit are adjacent at each of their noise levels."""
        samples, levels = data["sigma"].shape
        row = torch.arange(samples).reshape(-1, 1, self.engine.rows_per_unit).expand(-1, levels, -1)
        level = torch.arange(levels).reshape(1, -1, 1).expand_as(row)
        return row.reshape(-1), level.reshape(-1)

    def timesteps(self, data: Batch) -> torch.Tensor:
        sigma, kinds = data["sigma"], self.kinds(data)
        if len(set(kinds)) == 1:
            return self._timesteps(sigma, kinds[0])
        return torch.stack([self._timesteps(row, kind) for row, kind in zip(sigma, kinds, strict=True)])

    def _timesteps(self, sigma: torch.Tensor, kind: tuple) -> torch.Tensor:
        config, scheduler = self.drawn_as(kind)
        return self.adapter.timestep_at(sigma, scheduler, config)

    def model_outputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """velocity (N, ...) of N (sample, noise level) rows; with a gradient the predicted_reward (N,) too."""
        config, scheduler = self.drawn_as(self.kinds(micro_batch)[0])
        levels = micro_batch["levels"] = own_levels(scheduler, micro_batch["sigma"])
        x_t = noised(micro_batch["clean_latents"], micro_batch["noise"], levels)
        velocity = self._velocity(x_t, micro_batch["sigma"], micro_batch)
        if self.reward_of is None or not torch.is_grad_enabled():  # other policies' velocities are compared, no more
            return {"velocity": velocity}
        clean = self.adapter.whole_latents(self._chained(x_t, velocity, micro_batch), micro_batch)
        reward = self.reward_of(clean, config, [self.told[number] for number in micro_batch["told"].tolist()])
        if not reward.requires_grad:  # the loss would have none, or that of its other terms alone
            raise RunError(NO_GRADIENT)
        return {"velocity": velocity, "predicted_reward": reward}

    def _velocity(self, x_t: torch.Tensor, sigma: torch.Tensor, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Of rows of one kind, at the levels that the schedule has at σ (N,)."""
        kind = self.kinds(micro_batch)[0]
        module, (config, _) = self.engine.module, self.drawn_as(kind)
        inputs, _ = transformer_inputs(self.adapter, module, config, x_t, self._timesteps(sigma, kind), micro_batch)
        return self.adapter.predict_velocity(module, config, inputs, None)

    def _chained(self, x_t: torch.Tensor, velocity: torch.Tensor, micro_batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Euler steps ``x' = x + (σ' - σ)·v`` along the rollout's schedule, with a gradient through each; then x̂0."""
        _, scheduler = self.drawn_as(self.kinds(micro_batch)[0])
        sigma, schedule = micro_batch["sigma"], scheduler.sigmas.to(x_t.device)
        for _ in range(self.chained - 1):
            here = (schedule - sigma[:, None]).abs().argmin(dim=1)
            after = schedule[here + 1]
            step = own_levels(scheduler, after) - own_levels(scheduler, sigma)
            x_t, sigma = x_t + column(step, x_t) * velocity, after
            velocity = self._velocity(x_t, sigma, micro_batch)
        return predicted_clean(x_t, velocity, own_levels(scheduler, sigma))

    def before_update(self, data: Batch, anchors: Mapping[str, str], versions: Sequence[int] = ()) -> Batch:
        """Draw the noise, and the velocities of other policies (`anchors`: name in the batch -> policy), in CPU memory.

        This happens before the first optimizer step, so that "current" is the policy that made the samples. Where
        earlier ones made them, `versions` are those of all ranks' samples, and `drawn_by` is that of each row.
        """
        if "final_latents" in data:  # of a rollout; cached pairs have their clean latents already
            data = {"clean_latents" if k == "final_latents" else k: v for k, v in data.items()}
        noise = [
            torch.stack([seeded_noise(data["clean_latents"][row].shape, seed) for seed in seeds])
            for row, seeds in enumerate(data["noise_seed"].tolist())
        ]
        data = data | {"noise": stacked("noise", noise)}
        evaluated = {k: v for k, v in data.items() if k != "share"}  # fillers are evaluated too: nothing is dropped
        rows, levels = self.pairs(data)
        engine, found = self.engine, {}
        for name, policy in anchors.items():
            # A ratio to the policy itself is 1 only if both sides come from the same kernels.
            as_trained = policy == "current" and not engine.rounds_like_rollout
            velocity = [torch.empty_like(levels_of_one) for levels_of_one in noise]
            # Every rank runs as many forwards as others: all of its rows, whichever of them asks for that policy.
            for asked, own in self._asked(data, policy, versions if name == "old_velocity" else ()):
                with engine.eval_mode(), engine.policy(asked):
                    flat = engine.infer_batch(evaluated, training_graph=as_trained)["model_output"]["velocity"].cpu()
                for pair in own[rows].nonzero()[:, 0].tolist():
                    velocity[rows[pair]][levels[pair]] = flat[pair]
            found[name] = stacked(name, velocity)
        return data | found

    def _asked(self, data: Batch, policy: str, versions: Sequence[int]) -> list[tuple[str, torch.Tensor]]:
        """The policies that a name stands for, each with the samples that ask for it."""
        if policy == TEACHER:
            return [(name, data[TEACHER] == number) for number, name in enumerate(kept_teachers(self.engine))]
        if versions:
            return [(policy_at(policy, version), data["drawn_by"] == version) for version in versions]
        return [(policy, torch.ones(len(data["sigma"]), dtype=torch.bool))]


def seeded_noise(shape: torch.Size, seed: int) -> torch.Tensor:
    """Drawn on the CPU, so that it is the same on every device and rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
