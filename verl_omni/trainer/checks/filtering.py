"""Where groups without signal cannot be replaced, found before a worker starts."""

from verl_omni.config.schema import DiffusionTrainerConfig

WHERE = "algorithm.filter_groups.enable=true"


def check_filter(settings: DiffusionTrainerConfig) -> None:
    """Images are compared within a prompt, and a moving window counts training steps, not prompts."""
    rollout, mode = settings.actor_rollout_ref.rollout, settings.trainer.mode
    if not settings.algorithm.filter_groups.enable:
        return
    if rollout.n == 1:
        raise ValueError(
            f"{WHERE} compares the images of a prompt: set actor_rollout_ref.rollout.n to 2 or more, or leave it out"
        )
    if mode == "fully_async" and rollout.algo.sde_window_schedule not in (None, "random"):
        raise ValueError(
            f"{WHERE} with trainer.mode=fully_async takes more prompts than training steps have, by which "
            f"sde_window_schedule={rollout.algo.sde_window_schedule} would move: set trainer.mode=one_step_off, or "
            "actor_rollout_ref.rollout.algo.sde_window_schedule=random"
        )
