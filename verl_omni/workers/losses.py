"""From the actor's config to the function that the engine differentiates: the algorithm's loss, plus KL."""

import torch

from verl_omni.config import DiffusionActorConfig
from verl_omni.workers.first_ratio import compare_with_rollout


class LossFunction:
    """Called with what the model gave and the micro-batch; returns a `DiffusionLossResult`."""

    def __init__(self, config: DiffusionActorConfig):
        from verl_omni.algorithms.registry import get_diffusion_loss_fn

        self.config = config
        self.name = config.diffusion_loss.loss_mode
        self.loss_fn = get_diffusion_loss_fn(self.name)
        self.on_policy = False
        self.compares_rollout = False
        self.measures_rollout = False
        self.unmoved = False  # the weights are those whose velocities the batch has as the old ones

    @property
    def needs_reference(self) -> bool:
        return self.config.use_kl_loss or any(k.startswith("ref_") for k in self.loss_fn.data_keys(self.config))

    @property
    def needs_teacher(self) -> bool:
        return self.config.teacher.path is not None

    def compares_in_full(self, rollout_precision: str | None, ref_precision: str | None) -> bool:
        """Whether means of the update are compared with others of full precision, where the rollout has 8 bits: then
        no half of them is the rollout's."""
        others_in_full = self.needs_teacher or (self.needs_reference and ref_precision is None)
        return rollout_precision is not None and others_in_full

    def keeps_means(self, ref_precision: str | None) -> bool:
        """Whether the means that drew are wanted: by the loss, or because the reference is compared with them."""
        return ref_precision is not None or "old_prev_sample_mean" in self.loss_fn.data_keys(self.config)

    @property
    def by_group(self) -> bool:
        return self.loss_fn.by_group

    def group_terms(self, model_output: dict[str, torch.Tensor], data: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.loss_fn.group_terms(config=self.config, model_output=model_output, data=data)

    def __call__(self, model_output: dict[str, torch.Tensor], data: dict[str, torch.Tensor]):
        compared = compare_with_rollout(model_output, data, self.measures_rollout) if self.compares_rollout else {}
        if self.on_policy:
            # The weights have not moved since the rollout: the old policy is this one, whatever kernels sampled.
            data["old_log_probs"] = model_output["log_probs"].detach()
            data["old_prev_sample_mean"] = model_output["prev_sample_mean"].detach()
        if "ref_shift" in data:  # reference and rollout in 8 bits, training not: from its own old means it is as far
            data["ref_prev_sample_mean"] = data["old_prev_sample_mean"] + data["ref_shift"]
        self.loss_fn.validate_inputs(loss_name=self.name, model_output=model_output, data=data)
        result = self.loss_fn(config=self.config, model_output=model_output, data=data)
        # Every metric of the update is shown under `actor/`, whether its loss says so or not.
        named = {name.removeprefix("actor/"): value for name, value in result.metrics.items()}
        result.metrics = {**named, **compared, "loss": result.loss.detach()}
        if self.config.use_kl_loss and "ref_prev_sample_mean" in data:
            from verl_omni.algorithms.kl import KLLoss

            kl, metrics = KLLoss.compute_loss(
                prev_sample_mean=model_output["prev_sample_mean"],
                ref_prev_sample_mean=data["ref_prev_sample_mean"],
                std_dev_t=model_output["std_dev_t"],
                kl_std=model_output.get("kl_std"),
                log_prob_weights=data.get("log_prob_weights"),
            )
            result.loss = result.loss + self.config.kl_loss_coef * kl
            result.metrics = {**result.metrics, **metrics, "kl_loss": kl.detach()}
        if "teacher_prev_sample_mean" in data and "teacher_kl" not in result.metrics:
            from verl_omni.algorithms.opd import OPDLoss

            distance, metrics = OPDLoss.compute_loss(
                prev_sample_mean=model_output["prev_sample_mean"],
                teacher_prev_sample_mean=data["teacher_prev_sample_mean"],
                std_dev_t=model_output["std_dev_t"],
                sqrt_dt=data["sqrt_dt"],
                log_prob_weights=data.get("log_prob_weights"),
            )
            coef = self.config.teacher.coef
            result.loss = result.loss + (1.0 if coef is None else coef) * distance
            result.metrics = {**result.metrics, **metrics}
        return result


def build_loss_function(config: DiffusionActorConfig) -> LossFunction:
    return LossFunction(config)
