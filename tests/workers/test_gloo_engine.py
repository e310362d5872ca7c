"""verl's checkpoint engine on gloo: one sender, a training rank that only gathers, two servers, in one process."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from verl_omni.config import CheckpointEngineConfig
from verl_omni.workers.transfer import channel as channels
from verl_omni.workers.transfer.channel import Channel, backend, turns

# More than a bucket, of odd sizes: a tensor of several chunks, and others that begin at any byte of a bucket.
WEIGHTS = {
    "long": torch.arange(700_000, dtype=torch.float32),
    "odd": torch.randn(3).to(torch.bfloat16),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "matrix": torch.randn(33, 7).T,
    "number": torch.tensor(2.5, dtype=torch.float64),
}
CONFIG = CheckpointEngineConfig("gloo", update_weights_bucket_megabytes=1)


@pytest.fixture
def ends(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
    train, draw = [Channel(CONFIG, is_master=True), Channel(CONFIG)], [Channel(CONFIG), Channel(CONFIG)]
    with ThreadPoolExecutor(4) as threads:

        def everybody(call, *arguments):
            return list(threads.map(call, [*train, *draw], *arguments))

        met = everybody(lambda end: end.engine.prepare())
        topology = backend(CONFIG).build_topology(2, 2, met)
        kwargs = [one for side in topology for one in turns(side)]
        everybody(lambda end, kwargs: end.engine.init_process_group(**kwargs), kwargs)

        def update(weights, name):
            receiving = [threads.submit(asyncio.run, end.receive(name)) for end in draw]
            sent = [threads.submit(asyncio.run, end.send(iter(weights.items()), name)) for end in train]
            [one.result(60) for one in receiving]
            return sent[0].result(60)

        yield draw, update


def test_every_tensor_arrives_in_every_server_and_again(ends):
    draw, update = ends
    for version in (0, 1):
        weights = {name: tensor + version for name, tensor in WEIGHTS.items()}
        sent = update(weights, ("current", version))
        assert sent.count == len(WEIGHTS)
        for end in draw:
            arrived = dict(end.take(sent))
            assert arrived.keys() == weights.keys()
            for name, tensor in weights.items():
                assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor)


def test_what_is_not_taken_yet_survives_one_more_update(ends):
    (server, _), update = ends
    sent = [update({"w": torch.full((2,), float(version))}, ("current", version)) for version in range(3)]
    with pytest.raises(RuntimeError, match="weights current 0 are not here .any more.; here are: current 1, current 2"):
        server.take(sent[0])
    assert dict(server.take(sent[1]))["w"].tolist() == [1, 1]
    assert dict(server.take(sent[2]))["w"].tolist() == [2, 2]  # what came after it is still there
    assert not server._received


def test_what_was_asked_for_stays_however_many_come_before_it_is_read(ends):
    """A server waits for the batch that it draws, while others train on."""
    (server, _), update = ends
    first = update({"w": torch.zeros(2)}, ("current", 0))
    asked = server.take(first)
    later = [update({"w": torch.full((2,), float(version))}, ("current", version)) for version in (1, 2, 3)]
    assert dict(asked)["w"].tolist() == [0, 0]
    assert dict(server.take(later[-1]))["w"].tolist() == [3, 3] and not server._received


def test_a_changed_or_lost_tensor_is_an_error(ends, monkeypatch):
    (server, other), update = ends
    sent = update(WEIGHTS, ("current", 0))
    server._received[sent.name][0][1][5] += 1
    with pytest.raises(RuntimeError, match="5 weights with checksum .* arrived of 5"):
        list(server.take(sent))
    del other._received[sent.name][2]
    with pytest.raises(RuntimeError, match="4 weights .* arrived of 5"):
        list(other.take(sent))


def test_it_is_one_of_verls():
    assert "gloo" in channels.CheckpointEngineRegistry._registry
