"""MiniMax-H3."""

from verl_omni.pipelines.minimax_h3.adapter import MiniMaxH3

__all__ = ["MiniMaxH3"]
