"""Agent loops: how a prompt becomes requests to a rollout engine and a reward."""

from verl_omni.agent_loop.diffusion_agent_loop import DiffusionAgentLoopWorker, DiffusionSingleTurnAgentLoop
from verl_omni.agent_loop.manager import DiffusionAgentLoopManager

__all__ = ["DiffusionAgentLoopManager", "DiffusionAgentLoopWorker", "DiffusionSingleTurnAgentLoop"]
