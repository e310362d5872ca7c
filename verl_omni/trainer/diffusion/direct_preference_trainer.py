"""Direct preference: DPO, DiffusionNFT, AWM."""

from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer


class DirectPreferenceRayTrainer(BaseRayDiffusionTrainer):
    """DPO, DiffusionNFT, AWM: trains from final samples and rewards on single forward-process timesteps."""

    def fit(self) -> None:
        raise NotImplementedError(
            "algorithm.trainer_type=direct_preference cannot train yet: use policy_gradient with flow_grpo"
        )
