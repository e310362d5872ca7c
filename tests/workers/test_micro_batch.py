"""`ppo_micro_batch_size_per_gpu=auto`: what the trial tries, what it takes, and that it leaves nothing behind."""

import contextlib
import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    assert_same,
    loss_function,
    make_engine,
    model_config,
    roll_out,
    update,
    weights,
)
from ranks import start_ranks
from tiny_models import tiny_checkpoint

from verl_omni.workers import diffusion_worker
from verl_omni.workers.engine import base, micro_batch
from verl_omni.workers.engine.compile.blocks import compile_blocks
from verl_omni.workers.engine.micro_batch import Tried, expected, fastest, find_micro_batch, sizes
from verl_omni.workers.engine.optimizer import state_to_come

GIB = 2**30


class PretendedDevice:
    """Its memory has what stays, and as much as a line says for the rows that went through the model last."""

    def __init__(self, stays: float, a_row: float, total: float = 10 * GIB):
        self.stays, self.a_row, self.total, self.rows, self.tried = stays, a_row, total, 0, []

    def take(self, rows: int) -> None:
        self.rows = rows
        self.tried.append(rows)

    def max_memory_allocated(self) -> float:
        return self.stays + self.rows * self.a_row

    def memory_allocated(self) -> float:
        return self.stays

    def memory_reserved(self) -> float:
        return self.stays

    def mem_get_info(self) -> tuple[float, float]:
        return self.total - self.stays, self.total

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...

    def synchronize(self) -> None: ...


def engine_on(monkeypatch, device: PretendedDevice, most: float = math.inf, lora: bool = True, model: str = ""):
    """The more rows, the faster each; more than `most` are an error of the allocator."""
    engine = make_engine(model_config(model or tiny_checkpoint(), cfg=True, lora=lora))
    compute = engine.prepare_model_outputs

    def compute_and_count(batch):
        device.take(len(batch["latents"]))
        if device.rows > most:
            raise torch.OutOfMemoryError("pretended")
        return compute(batch)

    ticks = itertools.count()
    monkeypatch.setattr(engine, "prepare_model_outputs", compute_and_count)
    monkeypatch.setattr(micro_batch, "get_torch_device", lambda: device)
    monkeypatch.setattr(micro_batch, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    return engine


def with_memory(monkeypatch) -> None:
    """A GPU's, in place of the host's, which nobody looks at."""
    room = micro_batch._room
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(micro_batch, "_room", lambda engine, beside: room(on_gpu, beside))


def trial(engine, most: int, beside: float = 0.0):
    data = roll_out(engine, per_prompt=3)  # 18 pairs
    with engine.train_mode():
        return find_micro_batch(engine, data, most, beside)


@pytest.mark.parametrize(
    ("rows", "told", "most"),
    [
        (8, {}, 4),
        (8, {"mini_batch_rows": [2, 2, 2, 2]}, 4),
        (2, {"mini_batch_rows": [2]}, 4),
        (6, {"mini_batch_rows": [4, 2]}, 8),
    ],
)
def test_the_largest_mini_batch_is_the_most(monkeypatch, rows, told, most):
    """Four of a whole batch, and fewer where rewards have failed: a pair at two levels is four rows."""
    found = []
    monkeypatch.setattr(diffusion_worker, "find_micro_batch", lambda *given: found.append(given[2]) or (1, ""))
    engine = SimpleNamespace(
        micro_batch_size=0,
        before_update=lambda batch, anchors: batch,
        replay=SimpleNamespace(pairs=lambda batch: (torch.arange(2 * rows), torch.zeros(2 * rows))),
        train_mode=contextlib.nullcontext,
    )
    worker = SimpleNamespace(
        engine=engine,
        config=SimpleNamespace(data=SimpleNamespace(train_batch_size=8)),
        actor_config=SimpleNamespace(ppo_mini_batch_size=2),
        flop_meter=None,
        _batch=lambda data: {},
        _peak_memory=lambda: (0, 0),
        _bytes_beside=lambda: 0.0,
        _say_micro_batch=lambda why: None,
    )
    diffusion_worker.DiffusionWorker._find_micro_batch(worker, SimpleNamespace(meta_info=told))
    assert found == [most]


def test_candidates_are_whole_units():
    assert list(sizes(1, 18)) == [1, 2, 4, 8, 16, 18]
    assert list(sizes(2, 16)) == [2, 4, 8, 16]
    assert list(sizes(2, 2)) == list(sizes(2, 1)) == [2]
    assert list(sizes(3, 12)) == [3, 6, 12]


def test_a_process_that_may_take_a_part_of_the_memory_has_room_for_that(monkeypatch):
    device, engine = PretendedDevice(2 * GIB, 0), SimpleNamespace(device=torch.device("cuda"))
    monkeypatch.setattr(micro_batch, "get_torch_device", lambda: device)
    assert micro_batch._room(engine) == 9 * GIB  # a tenth stays free
    device.get_per_process_memory_fraction = lambda: 0.5
    assert micro_batch._room(engine) == 4 * GIB


def test_memory_follows_the_line_and_the_smallest_of_equals_is_taken():
    line = [Tried(rows, 1.0, 0.3 + 0.05 * rows, 0.25) for rows in (1, 2, 4)]
    assert expected(line, 8) == pytest.approx(0.3 + 0.05 * 8)
    assert expected(line[:1], 2) == pytest.approx(0.35 + (0.35 - 0.25))  # never less than on the line
    speeds = [Tried(rows, seconds, 0.0, 0.0) for rows, seconds in ((1, 1.0), (2, 1.5), (4, 2.0), (8, 3.99), (16, 9.0))]
    assert fastest(speeds).rows == 4
    assert fastest([Tried(1, 1.0, 1.4, 0.9)]).rows == 1  # nothing fits: the run says so itself
    assert fastest([Tried(1, 1.0, 0.9, 0.1), Tried(2, 1.0, 1.1, 0.1)]).rows == 1


def test_an_allocator_that_gives_up_ends_the_climb(monkeypatch):
    engine = engine_on(monkeypatch, PretendedDevice(0, 0), most=6)
    found, why = trial(engine, 18)
    assert (found, why.endswith("8 ran out of memory")) == (4, True)
    assert all(p.grad is None for p in engine.parameters.values())
    with pytest.raises(torch.OutOfMemoryError):
        trial(engine_on(monkeypatch, PretendedDevice(0, 0), most=0), 18)


@pytest.mark.parametrize(("a_row", "found"), [(0.4 * GIB, 18), (0.6 * GIB, 8), (1.2 * GIB, 4), (30 * GIB, 1)])
def test_a_tenth_of_the_memory_stays_free(monkeypatch, a_row, found):
    """Of 10 GiB, of which 1 is taken for good: 8 are for the rows, and nobody tries what takes more."""
    device = PretendedDevice(GIB, a_row)
    engine = engine_on(monkeypatch, device)
    with_memory(monkeypatch)
    assert trial(engine, 18)[0] == found == max(device.tried)


def test_what_another_model_will_take_is_counted():
    """Of 10 GiB 9 may be taken: 1 is here for good, and eight rows take 4.8."""
    for beside, found in ((0.0, 8), (3.0 * GIB, 8), (3.4 * GIB, 4)):
        device = PretendedDevice(GIB, 0.6 * GIB)
        with pytest.MonkeyPatch.context() as monkeypatch:
            engine = engine_on(monkeypatch, device)
            with_memory(monkeypatch)
            assert trial(engine, 18, beside)[0] == found == max(device.tried)


def test_where_others_have_the_memory_the_least_is_taken(monkeypatch):
    device = PretendedDevice(GIB, 0.1 * GIB)
    monkeypatch.setattr(device, "mem_get_info", lambda: (0, 20 * GIB))
    engine = engine_on(monkeypatch, device)
    with_memory(monkeypatch)
    assert trial(engine, 18)[0] == 1 == max(device.tried)


@pytest.mark.parametrize(("away", "found"), [(False, 4), (True, 8)])
def test_what_the_optimizer_will_keep_is_counted(monkeypatch, away, found):
    """AdamW: twice the trained weights, from the first step on. On the host it takes nothing here."""
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True))
    own = 2 * sum(p.nbytes for p in engine.parameters.values())
    assert state_to_come(engine.optimizer, engine.optimizer_config) == own
    device = PretendedDevice(0, 1.2 * own, total=10 * own / 0.9)  # eight rows take 9.6 of 10, and the state 1
    engine = engine_on(monkeypatch, device, lora=False)
    with_memory(monkeypatch)
    engine.common.optimizer_offload = away
    assert trial(engine, 18)[0] == found
    update(engine, roll_out(engine), loss_function(), steps=1)
    without_gradient = sum(p.nbytes for p in engine.parameters.values() if not engine.optimizer.state.get(p))
    assert state_to_come(engine.optimizer, engine.optimizer_config) == 2 * without_gradient


def drawing(compute):
    """As a layer that draws random numbers."""

    def drawn(batch):
        torch.rand(3)
        return compute(batch)

    return drawn


def test_the_trial_leaves_nothing_behind(monkeypatch):
    """Two updates around it are those of a run without it."""
    data, found = roll_out(make_engine(model_config(tiny_checkpoint(), cfg=True, lora=True)), per_prompt=3), []
    for tries in (False, True):
        engine = make_engine(model_config(tiny_checkpoint(), cfg=True, lora=True))
        engine.micro_batch_size, torch_state = 5, torch.get_rng_state()
        metrics = update(engine, data, loss_function(), steps=1)
        if tries:
            before = {name: value.clone() for name, value in data.items()}
            monkeypatch.setattr(engine, "prepare_model_outputs", drawing(engine.prepare_model_outputs))
            with engine.train_mode():
                rows, why = find_micro_batch(engine, data, 18)
            assert rows in sizes(1, 18) and why.startswith("rows/s of those tried: 1: ")
            assert torch.equal(torch.get_rng_state(), torch_state) and engine.changes == 1
            assert before.keys() == data.keys() and all(torch.equal(before[k], data[k]) for k in data)
            monkeypatch.undo()
        metrics += update(engine, data, loss_function(), steps=1)
        found.append((weights(engine), metrics))
    (expected_weights, expected_metrics), (same_weights, same_metrics) = found
    assert_same(expected_weights, same_weights, atol=0)
    assert same_metrics == expected_metrics


def test_nothing_is_compiled_for_the_trial(monkeypatch):
    """And what is compiled after it is what it would have been."""
    compiled, found = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    monkeypatch.setattr(base, "compile_blocks", functools.partial(compile_blocks, backend=backend))
    data = roll_out(make_engine(model_config(tiny_checkpoint(), lora=True)))
    for tries in (False, True):
        torch._dynamo.reset()
        engine = make_engine(model_config(tiny_checkpoint(), lora=True), use_torch_compile=True)
        if tries:
            compiled.clear()
            with engine.train_mode():
                find_micro_batch(engine, data, 4)
            assert not compiled
        update(engine, data, loss_function())
        found.append((len(compiled), weights(engine)))
        assert compiled
    assert found[0][0] == found[1][0]
    assert_same(found[0][1], found[1][1], atol=0)


def test_of_several_sizes_the_largest_is_tried():
    engine = make_engine(model_config(tiny_checkpoint()))
    kinds = [((32, 32, 0), 0.7), ((32, 64, 0), 0.7), ((32, 32, 0), 0.7), ((32, 64, 0), 0.7)]
    pairs = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]), torch.tensor([0, 1] * 4)
    engine.replay = SimpleNamespace(pairs=lambda data: pairs, kinds=lambda data: kinds)
    rows, within = micro_batch._largest(engine, {})
    assert rows.tolist() == [1, 1, 3, 3] and within.tolist() == [0, 1, 0, 1]


def test_a_checkpoint_keeps_what_was_found_and_a_number_is_the_users(tmp_path):
    engine = make_engine(model_config(tiny_checkpoint(), lora=True))
    engine.finds_micro_batch, engine.micro_batch_size = True, 7
    update(engine, roll_out(engine), loss_function(), steps=1)
    engine.save_checkpoint(str(tmp_path))
    for auto, own, expected_rows in ((True, 0, 7), (False, 3, 3)):
        again = make_engine(model_config(tiny_checkpoint(), lora=True))
        again.finds_micro_batch, again.micro_batch_size = auto, own
        again.load_checkpoint(str(tmp_path))
        assert again.micro_batch_size == expected_rows


def on_a_rank(rank: int, path: str, model: str) -> None:
    """The second rank has less memory: both take what goes there, and neither tries more."""
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{path}/meeting")
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = PretendedDevice(GIB, GIB * (0.4, 1.2)[rank])
        engine = engine_on(monkeypatch, device, model=model)
        with_memory(monkeypatch)
        found, _ = trial(engine, 18)
        assert found == max(device.tried) == 4
    dist.destroy_process_group()


def test_ranks_agree_and_none_tries_what_another_has_no_memory_for(tmp_path):
    """The model is there before they meet: of ranks transformers lets the first one alone write a folder."""
    start_ranks(on_a_rank, (str(tmp_path), str(tiny_checkpoint())))
