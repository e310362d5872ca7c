"""A rewriter on two ranks: the texts, however many each has, and what is learned from them, are those of one."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks
from safetensors.torch import load_file, save_file
from test_texts import batch, requests, rewriter
from tiny_language_model import language_model_folder

from verl_omni.workers.columns import Ragged


def learned(rows: list[int]) -> tuple[list[str], dict[str, float], torch.Tensor]:
    """(texts, metrics of an update on them, weights after it)."""
    own = rewriter()
    with own.writing(0):
        outputs = own.rollout.write_batch([requests()[row] for row in rows])
    data = batch(outputs) | {"advantages": torch.tensor([1.0, -0.5, 2.0, 0.3])[rows, None]}
    with own.engine.train_mode():
        metrics = own.train(own.with_old(data), first=True)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in own.engine.parameters.values()]
    return [o.response for o in outputs], metrics, torch.cat([w.detach().flatten() for w in weights])


def texts(bursts: list[list[int]]) -> list[list[str]]:
    """Of one rank: what it writes of each burst, and nothing of an empty one."""
    own = rewriter()
    with own.writing(0):
        return [[o.response for o in own.rollout.write_batch([requests()[i] for i in rows])] for rows in bursts if rows]


# Of each rank: three bursts, and one of a single text.
UNEQUAL = [[[0, 1, 2], [3, 1], [2]], [[], [3], []]]


def rank_main(rank: int, folder: str) -> None:
    language_model_folder()  # each its own: of several ranks, newer transformers let only the first write
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "store"), 2))
    unequal = texts(UNEQUAL[rank])
    written, metrics, weights = learned([0, 1] if rank == 0 else [2, 3])
    save_file({"weights": weights}, os.path.join(folder, f"{rank}.safetensors"))
    Path(folder, f"{rank}.json").write_text(json.dumps([written, metrics, unequal]))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_ranks_learn_as_one(tmp_path):
    start_ranks(rank_main, (str(tmp_path),))
    written, metrics, weights = learned([0, 1, 2, 3])
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found[0][0] + found[1][0] == written
    assert [unequal for *_, unequal in found] == [texts(UNEQUAL[0]), texts(UNEQUAL[1])] and len(set(written)) == 4
    for rank, (_, told, _) in enumerate(found):
        assert told == pytest.approx(metrics, rel=1e-4, abs=1e-5)
        after = load_file(tmp_path / f"{rank}.safetensors")["weights"]
        torch.testing.assert_close(after, weights, atol=2e-4, rtol=1e-3)


def test_a_sample_that_counts_for_nothing():
    """Its row is there, and the update is that of the others."""
    own, other = rewriter(), rewriter()
    data = own.with_old(batch(own.rollout.write_batch(requests())))
    three = {n: Ragged(v.rows[:3]) if isinstance(v, Ragged) else v[:3] for n, v in data.items()}
    own.train(data | {"share": torch.tensor([[1 / 6, 1 / 6]] * 3 + [[0.0, 0.0]])}, first=True)
    other.train(three, first=True)
    for a, b in zip(own.engine.parameters.values(), other.engine.parameters.values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
