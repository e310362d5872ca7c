"""The processes that hold weights: training engines, rollout engines, and what goes between them."""
