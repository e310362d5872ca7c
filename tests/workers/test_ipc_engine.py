"""verl's checkpoint engine through memory that processes share: three training ranks, two servers beside them."""

import asyncio
import dataclasses
import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from verl_omni.config import CheckpointEngineConfig
from verl_omni.workers.transfer.channel import Channel, backend, turns
from verl_omni.workers.transfer.weights import SentWeights

# More than a bucket.
WEIGHTS = {
    "long": torch.arange(200_000, dtype=torch.float32),
    "odd": torch.randn(3).to(torch.bfloat16),
    "matrix": torch.randn(333, 700).T,
    "number": torch.tensor(2.5, dtype=torch.float64),
}
CONFIG = CheckpointEngineConfig("ipc", update_weights_bucket_megabytes=1)


def meet(train: list[Channel], draw: list[Channel]) -> None:
    met = [end.engine.prepare() for end in (*train, *draw)]
    for side, ends in zip(backend(CONFIG).build_topology(len(train), len(draw), met), (train, draw), strict=True):
        for end, arguments in zip(ends, turns(side), strict=True):
            end.engine.init_process_group(**arguments)


def update(train: list[Channel], draw: list[Channel], version: int) -> list[SentWeights]:
    """Rank r sends weights that are greater by r and by 10 for each version."""
    meet(train, draw)
    name = ("current", version)
    with ThreadPoolExecutor(5) as threads:
        receiving = [threads.submit(asyncio.run, end.receive(name)) for end in draw]
        sending = []
        for rank, end in enumerate(train):
            weights = [(key, tensor + rank + 10 * version) for key, tensor in WEIGHTS.items()]
            sending.append(threads.submit(asyncio.run, end.send(weights, name)))
        [one.result(60) for one in receiving]
        sent = [one.result(60) for one in sending]
    for end in (*train, *draw):
        end.engine.finalize()
    return sent


def test_every_server_gets_what_the_rank_beside_it_sends_and_again():
    train, draw = [Channel(CONFIG, is_master=i == 0) for i in range(3)], [Channel(CONFIG) for _ in range(2)]
    for version in (0, 1):
        sent = update(train, draw, version)
        for rank, end in enumerate(draw):
            arrived = dict(end.take(sent[rank]))
            assert arrived.keys() == WEIGHTS.keys()
            for key, tensor in WEIGHTS.items():
                expected = tensor + rank + 10 * version
                assert arrived[key].dtype == expected.dtype and torch.equal(arrived[key], expected)


def broken() -> Iterator[tuple[str, torch.Tensor]]:
    yield from WEIGHTS.items()
    raise RuntimeError("out of memory")


def test_after_an_update_that_failed_the_next_one_arrives():
    """The sender fails before the server has come, and in the middle."""
    train, draw = [Channel(CONFIG)], [Channel(CONFIG)]
    meet(train, draw)
    with pytest.raises(RuntimeError, match="out of memory"), ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(asyncio.run, draw[0].receive(("current", 0)))
        try:
            asyncio.run(train[0].send(broken(), ("current", 0)))
        finally:
            train[0].engine.finalize()
            with pytest.raises((EOFError, ConnectionError)):
                receiving.result(60)
    assert list(draw[0].take(update(train, draw, 1)[0]))[0][1][0] == 10


def test_a_bucket_that_has_no_room_is_said(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    train, draw = [Channel(CONFIG)], [Channel(CONFIG)]
    meet(train, draw)
    with ThreadPoolExecutor(1) as threads:
        receiving = threads.submit(asyncio.run, draw[0].receive(("current", 0)))
        with pytest.raises(OSError, match="no room for 1 MiB in .*: lower .*update_weights_bucket_megabytes"):
            asyncio.run(train[0].send(WEIGHTS.items(), ("current", 0)))
        train[0].engine.finalize()
        with pytest.raises((EOFError, ConnectionError)):
            receiving.result(60)


def test_a_server_elsewhere_or_without_a_rank_is_refused():
    here = Channel(CONFIG).engine.prepare()
    gone = dataclasses.replace(here, device="GPU 7")
    with pytest.raises(ValueError, match="rollout server 0 is on GPU 7 of .*, training process 0 on the CPU"):
        backend(CONFIG).build_topology(1, 1, [here, gone])
    with pytest.raises(ValueError, match="2 rollout servers have 1 training processes"):
        backend(CONFIG).build_topology(1, 2, [here] * 3)


def test_nobody_else_may_enter_where_they_meet_and_nothing_stays():
    channel = Channel(CONFIG)
    folder = Path(channel.engine.prepare().address).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    channel.engine.finalize()
    assert not folder.exists()
