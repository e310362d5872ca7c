"""Agent loops: how a prompt becomes requests to a rollout engine and a reward."""

from verl_omni.agent_loop.diffusion_agent_loop import (
    DiffusionAgentLoopManager,
    DiffusionAgentLoopWorker,
    DiffusionSingleTurnAgentLoop,
)

__all__ = ["DiffusionAgentLoopManager", "DiffusionAgentLoopWorker", "DiffusionSingleTurnAgentLoop"]
