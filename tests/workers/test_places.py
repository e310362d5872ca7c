"""Where samples are drawn, as the trainer sees it."""

from pathlib import Path
from types import SimpleNamespace

import verl_omni
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


def test_one_rank_speaks_for_each_of_its_group():
    layout = Layout(replicate=2, shard=2, sequence=3)
    assert [layout.speaker(rank) for rank in range(6)] == [0, 0, 0, 3, 3, 3]
    assert {layout.speaker(rank) for rank in range(layout.world)} == set(layout.speakers)
    assert layout.parts == 6


def test_nobody_else_divides_ranks():
    """torch's words for a part of all ranks are in one file."""
    house = Path(verl_omni.__file__).parent
    words = ("new_subgroups", "init_device_mesh", "new_subgroups_by_enumeration")
    found = {str(file.relative_to(house)) for file in house.rglob("*.py") if any(w in file.read_text() for w in words)}
    assert found == {"workers/layout.py"}
