"""`trainer.mode=one_step_off` as a trainer."""

from verl_omni.experimental.separation.ray_diffusion_trainer import SeparateRayFlowGRPOTrainer


class OneStepOffRayFlowGRPOTrainer(SeparateRayFlowGRPOTrainer):
    """While step k is learned, the samples of step k + 1 are drawn, with the weights from before step k."""

    mode = "one_step_off"

    def fit(self) -> None:
        """Like any trainer's: `verl_omni.trainer.diffusion.pace.OneStepOff` says when samples are drawn."""
        super().fit()
