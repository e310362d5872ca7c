from verl_omni.rewards.image_manager import ImageRewardManager

__all__ = ["ImageRewardManager"]
