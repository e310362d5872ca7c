"""Training and rollout on devices of their own, under the names that documents give them. It is all `trainer.mode`."""
