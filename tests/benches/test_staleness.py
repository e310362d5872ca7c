"""What staleness costs: the order that is written, and what is told of the runs."""

from benchmarks.staleness import table, typed, write_order
from verl_omni.trainer.diffusion.replay import RecordedQueue, check_replay


def test_every_step_learns_from_what_was_drawn_so_many_steps_before(tmp_path):
    write_order(tmp_path / "order", behind=2, steps=5, batch_size=3)
    check_replay(str(tmp_path / "order"), str(tmp_path / "run"), steps=5, batch_size=3)
    queue = RecordedQueue(3, 5, tmp_path / "order")
    assert queue.draws == {0: {(0, 1, 2), (3, 4, 5), (6, 7, 8)}, 1: {(9, 10, 11)}, 2: {(12, 13, 14)}}
    assert [{group["version"] for group in groups} for groups in queue.order] == [{0}, {0}, {0}, {1}, {2}]


def test_what_is_told():
    found = {(0, "clipped"): [(0.7, 0.0), (0.8, 0.0)], (4, "weighted"): [(0.5, 4.0), (0.6, 3.0)]}
    assert table(found).splitlines()[2:] == [
        "| 0 | clipped | 0.700 0.800 | 0.750 |",
        "| 3.5 | weighted | 0.500 0.600 | 0.550 |",
    ]


def test_settings_as_one_types_them():
    assert typed({"a": {"b": 1, "c": {"d": 2e-4}}, "e": False}) == ["a.b=1", "a.c.d=0.0002", "e=False"]
