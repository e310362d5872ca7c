from verl_omni.reward_loop.reward_manager.image import ImageRewardManager

__all__ = ["ImageRewardManager"]
