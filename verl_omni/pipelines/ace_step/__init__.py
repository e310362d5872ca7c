"""ACE-Step."""

from verl_omni.pipelines.ace_step.adapter import AceStep

__all__ = ["AceStep"]
