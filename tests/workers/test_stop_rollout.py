"""The end of a rollout in a training worker."""

from types import SimpleNamespace

from verl_omni.workers.diffusion_worker import DiffusionWorker


def test_weights_stay_in_their_place_while_anything_is_drawn():
    """A request that nobody waits for any more may still be in a forward."""
    happened = []
    rollout = SimpleNamespace(drain=lambda: happened.append("drained"), has_a_copy=True)
    scope = SimpleNamespace(close=lambda: happened.append("closed"))
    DiffusionWorker.stop_rollout(SimpleNamespace(rollout=rollout, _rollout_scope=scope))
    assert happened == ["drained", "closed"]
