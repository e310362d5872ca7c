"""Noise schedules and reverse steps."""

from verl_omni.pipelines.schedulers.flow_match_sde import FlowMatchSDEDiscreteScheduler
from verl_omni.pipelines.schedulers.steps import get_step, register_step
from verl_omni.pipelines.schedulers.windows import check_window, sde_window

__all__ = ["FlowMatchSDEDiscreteScheduler", "check_window", "get_step", "register_step", "sde_window"]
