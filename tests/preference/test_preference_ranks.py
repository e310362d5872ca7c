"""One rank and two give the same update for every loss, also where units do not divide among ranks."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from preference_cases import (
    FOLLOWING,
    LOSSES,
    assert_same,
    deal,
    disturb,
    follow,
    make_batch,
    make_engine,
    moved,
    update,
    weights,
)
from ranks import start_ranks
from tiny_models import tiny_checkpoint

from verl_omni.trainer.diffusion.ordering import deal_units

pytestmark = pytest.mark.timeout(900)  # all cases run in one fixture, on a machine that may be busy

# Every loss with and without LoRA, and with each architecture.
CASES = [
    (loss, architecture, lora)
    for i, loss in enumerate(LOSSES)
    for architecture, lora in (("QwenImagePipeline", i % 2 == 0), ("StableDiffusion3Pipeline", i % 2 == 1))
] + [("opd_forward", "QwenImagePipeline", True), ("draft", "QwenImagePipeline", False)]
TEACHERS = {"adapter": "teacher/export", "model": "model"}  # swapped in, and a module of its own


def run(case: tuple, path: str, data: dict[str, torch.Tensor], folder: str, ranks: int, rank: int) -> tuple:
    loss, _, lora = case
    engine = make_engine(path, loss, lora, micro_batch=4)
    if loss in FOLLOWING:
        follow(engine, {name: os.path.join(folder, place) for name, place in TEACHERS.items()})
    start = weights(engine)
    dealt = deal(data, engine.rows_per_unit, ranks, rank)
    metrics = update(engine, dealt, loss)
    return metrics, weights(engine), start


def rank_main(rank: int, folder: str, paths: dict[str, str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "store"), 2))
    for i, case in enumerate(CASES):
        data = torch.load(os.path.join(folder, f"{i}.pt"))
        seen = run(case, paths[case[1]], data, folder, ranks=2, rank=rank)
        if rank == 0:
            torch.save(seen, os.path.join(folder, f"{i}_seen.pt"))
    dist.barrier()
    dist.destroy_process_group()


def make_teachers(folder: Path) -> None:
    """An adapter that is away from where the student begins, and another model."""
    make_engine(tiny_checkpoint(), "awm", lora=True).save_checkpoint(str(folder / "teacher"))
    model = make_engine(tiny_checkpoint(), "awm")
    disturb(model, "", 0.02)
    model.save_checkpoint(str(folder / "other"))
    (folder / "other/export").rename(folder / "model")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    paths = {case[1]: str(tiny_checkpoint(case[1])) for case in CASES}
    one = []
    make_teachers(folder)
    for i, case in enumerate(CASES):
        data = make_batch(make_engine(paths[case[1]], case[0], case[2]))
        if i % 2 == 0:
            data = {k: v[:4] if case[0] == "dpo" else v[:5] for k, v in data.items()}
        torch.save(data, folder / f"{i}.pt")
        one.append(run(case, paths[case[1]], data, str(folder), ranks=1, rank=0))
    start_ranks(rank_main, args=(str(folder), paths))
    return [(one[i], torch.load(folder / f"{i}_seen.pt")) for i in range(len(CASES))]


@pytest.mark.parametrize("i", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_one_and_two_ranks_agree(runs, i):
    one, two = runs[i]
    assert moved(one[1], one[2]) > 1e-3
    assert_same(one[1], two[1])
    for ours, theirs in zip(one[0], two[0], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize(("units", "minis"), [(1, 1), (5, 2), (6, 3), (7, 3), (2, 4)])
@pytest.mark.parametrize("seed", [None, 3])
def test_units_are_dealt_alike_for_any_number_of_ranks(units, minis, ranks, seed):
    order, share, sizes = deal_units(units, minis, ranks, seed)
    alone, _, alone_sizes = deal_units(units, minis, 1, seed)
    assert sorted(alone.tolist()) == list(range(units)) and len(sizes) == min(units, minis)
    by_rank, shares = order.reshape(ranks, -1).split(sizes, dim=1), share.reshape(ranks, -1).split(sizes, dim=1)
    for mini, mini_share, expected in zip(by_rank, shares, alone.split(alone_sizes), strict=True):
        real = mini[mini_share > 0]
        assert sorted(real.tolist()) == sorted(expected.tolist())  # every unit counts once, for any number of ranks
        assert mini_share[mini_share > 0].tolist() == pytest.approx([ranks / len(expected)] * len(expected))
