"""What a forward of policy gradient computes: stored steps of the reverse process, evaluated again."""

import torch

from verl_omni.pipelines.sampling import transformer_inputs
from verl_omni.pipelines.schedulers.flow_match_sde import check_timesteps, sqrt_neg_dt
from verl_omni.pipelines.schedulers.steps import kl_std
from verl_omni.workers.engine.base import DiffusionEngine
from verl_omni.workers.engine.pairs import pair_indices


class ReverseSteps(DiffusionEngine):
    """Policy gradient: a forward re-evaluates stored reverse steps."""

    def check_batch(self, data: dict[str, torch.Tensor]) -> None:
        check_timesteps(self.scheduler, data["all_timesteps"].float())

    def trained_timesteps(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return data["all_timesteps"].cpu()[pair_indices(data)].reshape(len(data["all_timesteps"]), -1)

    def prepare_model_outputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """log_probs (N,), prev_sample_mean (N, ...), std_dev_t and kl_std (N, 1, ...) of N stored (sample, step)s."""
        sample, timestep = micro_batch["latents"][:, 0], micro_batch["timesteps"][:, 0]
        inputs, negative = transformer_inputs(
            self.adapter, self.module, self.model_config, sample, timestep, micro_batch
        )
        if negative is not None and "uncond_velocity" in micro_batch:
            negative = {"velocity": micro_batch["uncond_velocity"]}
        log_probs, mean, std_dev_t = self.adapter.forward_and_sample_previous_step(
            self.module,
            self.scheduler,
            self.model_config,
            inputs,
            negative,
            scheduler_inputs={"sample": sample, "prev_sample": micro_batch["prev_latents"], "timestep": timestep},
            step=0,
        )
        micro_batch["sqrt_dt"] = sqrt_neg_dt(self.scheduler, timestep)
        in_kl = kl_std(self.model_config.algo.sde_type, std_dev_t, micro_batch["sqrt_dt"])
        return {"log_probs": log_probs, "prev_sample_mean": mean, "std_dev_t": std_dev_t, "kl_std": in_kl}
