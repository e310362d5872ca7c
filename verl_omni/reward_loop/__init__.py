"""Rewards, computed beside the rollout."""

from verl_omni.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker

__all__ = ["RewardLoopManager", "RewardLoopWorker"]
