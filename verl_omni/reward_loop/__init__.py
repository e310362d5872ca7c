"""Rewards, computed beside the rollout."""

from verl_omni.rewards.reward_loop import RewardLoopManager, RewardLoopWorker

__all__ = ["RewardLoopManager", "RewardLoopWorker"]
