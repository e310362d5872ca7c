"""What a forward of direct preference computes: velocities at single noise levels of the forward process."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from verl_omni.algorithms.forward_process import noised
from verl_omni.pipelines.sampling import transformer_inputs
from verl_omni.workers.engine.base import DiffusionEngine
from verl_omni.workers.engine.policies import policy_at

# What exists once for each noise level of a sample, (B, K, ...). Everything else exists once for each sample.
LEVEL_KEYS = ("sigma", "noise", "old_velocity", "ref_velocity", "ema_velocity")
# Bookkeeping that no loss sees.
OWN_KEYS = ("noise_seed", "share", "drawn_by")


class NoiseLevels(DiffusionEngine):
    """Direct preference: a forward predicts the velocity of noised clean latents, without guidance."""

    def initialize(self) -> None:
        super().initialize()
        self.unguided_config = self.adapter.unguided(self.model_config)

    def prepare_model_outputs(self, micro_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """velocity (N, ...) of N (sample, noise level) rows."""
        sigma = micro_batch["sigma"]
        x_t = noised(micro_batch["clean_latents"], micro_batch["noise"], sigma)
        timestep = self.trained_timesteps(micro_batch)
        config = self.unguided_config
        inputs, _ = transformer_inputs(self.adapter, self.module, config, x_t, timestep, micro_batch)
        return {"velocity": self.adapter.predict_velocity(self.module, config, inputs, None)}

    def trained_timesteps(self, data: dict[str, torch.Tensor]) -> torch.Tensor:
        return data["sigma"] * self.scheduler.config.num_train_timesteps

    def before_update(
        self, data: dict[str, torch.Tensor], anchors: Mapping[str, str], versions: Sequence[int] = ()
    ) -> dict[str, torch.Tensor]:
        """Draw the noise, and the velocities of other policies (`anchors`: name in the batch -> policy), in CPU memory.

        This happens before the first optimizer step, so that "current" is the policy that made the samples. Where
        earlier ones made them, `versions` are those of all ranks' samples, and `drawn_by` is that of each row.
        """
        if "final_latents" in data:  # of a rollout; cached pairs have their clean latents already
            data = {"clean_latents" if k == "final_latents" else k: v for k, v in data.items()}
        shape = data["clean_latents"].shape[1:]
        noise = [[seeded_noise(shape, seed) for seed in seeds] for seeds in data["noise_seed"].tolist()]
        data = data | {"noise": torch.stack([torch.stack(levels) for levels in noise])}
        evaluated = {k: v for k, v in data.items() if k != "share"}  # fillers are evaluated too: nothing is dropped
        rows, levels = self.rows_and_levels(data)
        found = {}
        for name, policy in anchors.items():
            # A ratio to the policy itself is 1 only if both sides come from the same kernels.
            as_trained = policy == "current" and not self.rounds_like_rollout
            stale = name == "old_velocity" and versions
            for version in versions if stale else [None]:
                # Every rank runs as many forwards as others: all of its rows, whoever drew them.
                with self.eval_mode(), self.policy(policy_at(policy, version) if stale else policy):
                    output = self.infer_batch(evaluated, training_graph=as_trained)["model_output"]
                flat = output["velocity"].cpu()
                own = data["drawn_by"][rows].cpu() == version if stale else slice(None)
                found.setdefault(name, flat.new_empty(data["noise"].shape))[rows[own], levels[own]] = flat[own]
        return data | found

    def rows_and_levels(self, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample and noise level of every row. Samples of one unit are adjacent at each of their noise levels."""
        samples, levels = data["sigma"].shape
        row = torch.arange(samples).reshape(-1, 1, self.rows_per_unit).expand(-1, levels, -1)
        level = torch.arange(levels).reshape(1, -1, 1).expand_as(row)
        return row.reshape(-1), level.reshape(-1)

    def split(self, data: dict[str, torch.Tensor], size: int) -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        """Micro-batches of whole units. Fillers (share 0) run only where a rank has nothing else to run."""
        rows, levels = self.rows_and_levels(data)
        share = data["share"].cpu() if "share" in data else torch.full((len(data["sigma"]),), 1 / len(data["sigma"]))
        size = self.whole_units(size)
        for row, level in zip(rows.split(size), levels.split(size), strict=True):
            weight = share[row]
            real = weight > 0
            if real.any():
                row, level = row[real], level[real]
            yield take_rows(data, row, level), weight.sum().item() / data["sigma"].shape[1]


def take_rows(data: dict[str, torch.Tensor], rows: torch.Tensor, levels: torch.Tensor) -> dict[str, torch.Tensor]:
    device = data["sigma"].device
    rows, levels = (index.to(device, non_blocking=True) for index in (rows, levels))  # the host runs ahead
    return {
        key: value[rows, levels] if key in LEVEL_KEYS else value[rows]
        for key, value in data.items()
        if key not in OWN_KEYS
    }


def seeded_noise(shape: torch.Size, seed: int) -> torch.Tensor:
    """Drawn on the CPU, so that it is the same on every device and rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
