"""Of the samples that are trained on, one micro-batch at a time is on the device; the numbers do not depend on it."""

from collections.abc import Iterable

import pytest
import torch
from engine_cases import assert_same, loss_function, make_engine, model_config, part, roll_out, update, weights
from tiny_models import tiny_checkpoint
from verl.protocol import DataProto

from verl_omni.perf.live_bytes import LiveBytes
from verl_omni.utils.arrays import object_array
from verl_omni.workers import columns
from verl_omni.workers.engine.replay import Replay
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.trajectories import COLUMN, TrajectoryStore

MICRO = 2
META = torch.device("meta")  # has the shapes of what would be on a GPU


@pytest.fixture(scope="module")
def drawn(process_group):
    return roll_out(make_engine(model_config(tiny_checkpoint())), per_prompt=6)


def is_large(name: str) -> bool:
    return columns.of(name).large or name not in columns.DECLARED


BOTH_LENGTHS = [row for pair in zip(range(6), range(6, 12), strict=True) for row in pair]  # of prompts


def kept(store: TrajectoryStore, data: dict[str, torch.Tensor], rows: Iterable[int]) -> DataProto:
    """As a rollout leaves it: what is large in the store, the rest with the driver."""
    places = []
    for row in rows:
        large = {name: value[row].clone() for name, value in data.items() if columns.of(name).large}
        texts = {name: value[row].clone() for name, value in data.items() if name not in columns.DECLARED}
        places.append(store.keep(f"e0/{row}", RolloutOutput(torch.zeros(3, 4, 4), large, texts)).reference)
    small = {name: value[list(rows)] for name, value in data.items() if not is_large(name)}
    return DataProto.from_dict(small, {COLUMN: object_array(places)})


def batch_of(store: TrajectoryStore, data: DataProto) -> dict:
    return {name: data.batch[name] for name in data.batch.keys()} | store.batch(data)


def test_a_pass_through_the_training_graph_holds_the_graph_of_one_micro_batch(drawn):
    engine = make_engine(model_config(tiny_checkpoint()))
    peaks, steps = {}, drawn["all_timesteps"].shape[1]
    for samples in (1, 2, 1, 6):  # the first two make what stays
        rows = {name: value[:samples] for name, value in drawn.items()}
        with LiveBytes() as live, engine.eval_mode():
            engine.infer_batch(rows, training_graph=True, micro_batch_size=steps)
        peaks[samples] = live.most
    assert peaks[6] < 1.1 * peaks[1], peaks


def test_the_memory_of_an_update_does_not_grow_with_its_samples(drawn):
    engine = make_engine(model_config(tiny_checkpoint()))
    engine.micro_batch_size = MICRO
    peaks, loss = {}, loss_function()
    for samples in (2, 4, 12):  # the first makes what stays
        store = TrajectoryStore()
        data = kept(store, drawn, BOTH_LENGTHS[:samples])
        engine.optimizer_zero_grad()
        with LiveBytes() as live, engine.train_mode():
            engine.forward_backward_batch(batch_of(store, data), loss)
        peaks[samples] = live.most
        row = sum(value.nbytes for value in store.rows["e0/0"].values())
    assert peaks[12] - peaks[4] < row, peaks


def test_the_device_has_what_is_small_and_one_micro_batch(drawn):
    """On meta tensors: what went there, and how much of it."""
    store = TrajectoryStore()
    data = columns.near(batch_of(store, kept(store, drawn, range(6))), META)
    there = {name for name, value in data.items() if value.device == META}
    assert {"old_log_probs", "advantages"} <= there and not any(is_large(name) for name in there)

    class Engine:
        device = META

    replay = object.__new__(Replay)
    replay.engine, rows = Engine(), torch.tensor([4, 1])
    for name in ("all_latents", "prompt_embeds"):
        assert replay.taken(data[name], rows).device == META and len(replay.taken(data[name], rows)) == 2
        assert data[name].device.type == "cpu"


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_the_same_update_wherever_samples_lie(drawn, on_host):
    plain, other = (make_engine(model_config(tiny_checkpoint())) for _ in range(2))
    whole = part(drawn, slice(0, 8))
    before = update(plain, dict(whole), loss_function(kl=0.0))
    store = TrajectoryStore(on_host)
    other.outputs_on_host = on_host
    data = kept(store, drawn, range(8))
    assert before == update(other, batch_of(store, data), loss_function(kl=0.0))
    assert_same(weights(plain), weights(other), atol=0.0)
    own = store.rows["e0/3"]["all_latents"]
    assert torch.equal(own, drawn["all_latents"][3])
    means = other.infer_batch(batch_of(store, data))["model_output"]["prev_sample_mean"]
    assert torch.equal(means, plain.infer_batch(dict(whole))["model_output"]["prev_sample_mean"])
