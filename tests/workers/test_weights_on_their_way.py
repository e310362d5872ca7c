"""Weights between processes: what comes out is what went in, or an error. Ray's store is a dict here."""

import itertools

import pytest
import torch
from engine_cases import make_engine, model_config
from tiny_models import tiny_checkpoint

from verl_omni.workers.transfer import weights as on_their_way
from verl_omni.workers.transfer.weights import checksum, from_buckets, store_in_buckets

WEIGHTS = {
    "a.weight": torch.arange(7, dtype=torch.float32),
    "b.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16(),
    "c.bias": torch.tensor(3.5),
    "d.empty": torch.zeros(0, 4),
    "e.turned": torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).T,
}


@pytest.fixture(autouse=True)
def store(monkeypatch) -> dict[int, dict[str, torch.Tensor]]:
    held, numbers = {}, itertools.count()

    def put(bucket):
        held[number := next(numbers)] = bucket
        return number

    monkeypatch.setattr(on_their_way.ray, "put", put)
    monkeypatch.setattr(on_their_way.ray, "get", held.__getitem__)
    monkeypatch.setattr(on_their_way, "BUCKET_BYTES", 60)
    return held


def test_all_arrive_in_their_order(store):
    stored = store_in_buckets(WEIGHTS.items())
    assert stored.count == len(WEIGHTS) and len(stored.buckets) > 1
    found = dict(from_buckets(stored))
    assert list(found) == list(WEIGHTS) and all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
    assert store_in_buckets(WEIGHTS.items(), keep=False).count == 0


@pytest.mark.parametrize("harm", ["lost", "changed", "renamed", "twice"])
def test_what_is_lost_or_changed_on_the_way_is_noticed(store, harm):
    stored = store_in_buckets(WEIGHTS.items())
    bucket = store[stored.buckets[0]]
    if harm == "lost":
        del bucket["a.weight"]
    elif harm == "changed":
        bucket["a.weight"][3] += 1e-6
    elif harm == "renamed":
        bucket["b"] = bucket.pop("a.weight")
    else:
        stored.buckets.append(stored.buckets[0])
    with pytest.raises(RuntimeError, match=f"arrived of {len(WEIGHTS)} with "):
        list(from_buckets(stored))


def test_a_checksum_counts_every_byte():
    assert checksum("", torch.tensor([1, 2, 3], dtype=torch.uint8)) == 6
    assert checksum("", torch.tensor([5, 7], dtype=torch.int64)) == 12
    assert checksum("", torch.arange(20, dtype=torch.uint8)[3:]) == checksum("", torch.arange(3, 20, dtype=torch.uint8))
    assert checksum("", torch.tensor([1, 0, 0, 0, 0, 0, 0, 0, 9], dtype=torch.uint8)) == 10


def test_what_a_server_would_round_is_rounded_before_it_is_sent(process_group):
    """vLLM-Omni holds all weights in the dtype that it computes in. Adapters are added to others first, in float32."""
    from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout
    from verl_omni.workers.rollout.vllm_rollout.engine import VllmOmniRollout

    engine = make_engine(model_config(tiny_checkpoint()))
    whole, adapter = engine.model_config, model_config(tiny_checkpoint(), lora=True)
    assert VllmOmniRollout.receives(whole, torch.bfloat16) == torch.bfloat16
    assert VllmOmniRollout.receives(adapter, torch.bfloat16) is DiffusersRollout.receives(whole, torch.bfloat16) is None
    held, sent = dict(engine.get_per_tensor_param()[0]), dict(engine.get_per_tensor_param(dtype=torch.bfloat16)[0])
    assert held.keys() == sent.keys() and {tensor.dtype for tensor in held.values()} == {torch.float32}
    assert all(torch.equal(sent[name], tensor.bfloat16()) for name, tensor in held.items())
