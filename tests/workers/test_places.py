"""Where samples are drawn, as the trainer sees it."""

from types import SimpleNamespace

from verl_omni.trainer.diffusion.rollouts import EmbeddedRollouts
from verl_omni.workers.layout import Layout


def test_a_sample_is_drawn_where_it_is_trained_if_that_is_known():
    two = EmbeddedRollouts(SimpleNamespace(workers=["a", "b"]), Layout(shard=2))
    assert two.places([1, 0, 1, 0], 4) == ([1, 0, 1, 0], False)
    assert two.places(None, 4) == ([0, 0, 1, 1], True)
    one = EmbeddedRollouts(SimpleNamespace(workers=["a"]), Layout())
    assert one.places(None, 3) == ([0, 0, 0], False)


def test_a_sample_that_several_ranks_train_on_is_drawn_by_one_of_them():
    layout = Layout(shard=2, sequence=2)
    four = EmbeddedRollouts(SimpleNamespace(workers=["a", "b", "c", "d"]), layout)
    assert four.servers == ["a", "b", "c", "d"], "none of them waits while others draw"
    assert four.places([1, 0, 1, 0], 4) == ([0, 1, 2, 3], True)
    together = EmbeddedRollouts(SimpleNamespace(workers=["a", "b", "c", "d"]), layout, share_samples=True)
    assert together.servers == ["a", "c"], "the others compute with them"
    assert together.places([1, 0, 1, 0], 4) == ([0, 0, 1, 1], True)
    pair = EmbeddedRollouts(SimpleNamespace(workers=["a", "b"]), Layout(sequence=2), share_samples=True)
    assert pair.places(None, 2) == ([0, 0], True), "the other one trains on them too"
    assert [layout.data_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert layout.ranks_of_rows(6) == [0, 0, 0, 1, 1, 1]
