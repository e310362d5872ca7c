"""What a forward of policy gradient computes: stored steps of the reverse process, evaluated again."""

import torch

from verl_omni.pipelines.sampling import transformer_inputs
from verl_omni.pipelines.schedulers.flow_match_sde import check_timesteps, of_steps, pulls, step_sigmas
from verl_omni.pipelines.schedulers.steps import kl_std, step_names
from verl_omni.pipelines.schedulers.windows import trainable_steps
from verl_omni.workers.engine.replay import Batch, MicroBatch, Replay, Replays


class ReverseSteps(Replay):
    per = "step"
    outputs = frozenset({"log_probs", "prev_sample_mean", "std_dev_t", "kl_std"})

    def __init__(self, engine: Replays):
        super().__init__(engine)
        self._pulls: dict[tuple, torch.Tensor] = {}

    def pairs(self, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """`train_steps` (B, K) names the steps where only some are trained."""
        rows, steps = data["all_timesteps"].shape
        if "train_steps" in data:
            chosen = data["train_steps"]
            return torch.arange(rows).repeat_interleave(chosen.shape[1]), chosen.reshape(-1).cpu()
        return torch.arange(rows).repeat_interleave(steps), torch.arange(steps).repeat(rows)

    def timesteps(self, data: Batch) -> torch.Tensor:
        return data["all_timesteps"].cpu()[self.pairs(data)].reshape(len(data["all_timesteps"]), -1)

    def check(self, data: Batch) -> None:
        kinds = self.kinds(data)
        for kind in set(kinds):
            own = torch.tensor([other == kind for other in kinds])
            check_timesteps(self.drawn_as(kind)[1], data["all_timesteps"][own].float())

    def take(self, data: Batch, part: MicroBatch) -> dict[str, torch.Tensor]:
        rows, steps = part.rows, part.within
        return super().take(data, part) | {
            "latents": self.taken(data["all_latents"], (rows, steps))[:, None],
            "prev_latents": self.taken(data["all_latents"], (rows, steps + 1)),
            "timesteps": self.taken(data["all_timesteps"], (rows, steps))[:, None],
        }

    def model_outputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """log_probs (N,), prev_sample_mean (N, ...), std_dev_t and kl_std (N, 1, ...) of N stored (sample, step)s."""
        module, kind = self.engine.module, self.kinds(micro_batch)[0]
        config, scheduler = self.drawn_as(kind)
        sample, timestep = micro_batch["latents"][:, 0], micro_batch["timesteps"][:, 0]
        inputs, negative = transformer_inputs(self.adapter, module, config, sample, timestep, micro_batch)
        if negative is not None and "uncond_velocity" in micro_batch:
            negative = {"velocity": micro_batch["uncond_velocity"]}
        log_probs, mean, std_dev_t = self.adapter.forward_and_sample_previous_step(
            module,
            scheduler,
            config,
            inputs,
            negative,
            scheduler_inputs={"sample": sample, "prev_sample": micro_batch["prev_latents"], "timestep": timestep},
            step=0,
        )
        sigma, sigma_next = step_sigmas(scheduler, timestep)
        micro_batch["sqrt_dt"] = (sigma - sigma_next).sqrt()
        weights = getattr(scheduler, "log_prob_weights", None)  # an adapter's own scheduler may know of none
        if weights is not None:
            micro_batch["log_prob_weights"] = weights.to(sample.device).expand(len(sample), -1)
        if config.algo.sde_type in step_names():  # of others only the adapter's own scheduler knows
            micro_batch |= self._pull(kind, timestep)
        in_kl = kl_std(config.algo.sde_type, std_dev_t, micro_batch["sqrt_dt"])
        return {"log_probs": log_probs, "prev_sample_mean": mean, "std_dev_t": std_dev_t, "kl_std": in_kl}

    def _pull(self, kind: tuple, timestep: torch.Tensor) -> dict[str, torch.Tensor]:
        """How steeply log-probabilities follow the velocity (`Step.pull`): of each pair's step, (N,), and of all steps
        that may be trained, (N, K)."""
        config, scheduler = self.drawn_as(kind)
        if kind not in self._pulls:
            found = pulls(scheduler, config.algo.sde_type, config.algo.noise_level)
            self._pulls[kind] = found.to(self.engine.device)
        found, trained = self._pulls[kind], trainable_steps(config.algo, len(scheduler.timesteps))
        every = found[trained.start : trained.stop].expand(len(timestep), -1)
        return {"step_pull": of_steps(scheduler, timestep, found), "schedule_pulls": every}
