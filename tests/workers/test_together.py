"""A rank that fails while ranks draw a sample together: the one that draws says which and why, and all go on."""

import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import start_ranks

from verl_omni.workers.engine.fsdp import together
from verl_omni.workers.layout import Layout

pytestmark = pytest.mark.timeout(120)

PATIENCE = timedelta(seconds=2)
TOLD = "rank 1 failed to compute its share of a sample: ValueError: rank 1 cannot"


class Summed(torch.nn.Module):
    """Adds up what ranks have, unless one of those that `fail` comes: before the others have it, or after."""

    def __init__(self, group: dist.ProcessGroup, fail: tuple[int, ...] = (), after: bool = False, memory: bool = False):
        super().__init__()
        self.group, self.fail, self.after = group, fail, after
        self.error = torch.OutOfMemoryError if memory else ValueError
        self.seen: list[tuple] = []

    def _fail(self, now: bool) -> None:
        if now and dist.get_rank() in self.fail:
            raise self.error(f"rank {dist.get_rank()} cannot")

    def forward(self, one: torch.Tensor, *, others: dict, kind: str | None = None) -> torch.Tensor:
        self.seen.append((one, others, kind))
        self._fail(not self.after)
        total = one.clone()
        dist.all_reduce(total, group=self.group)
        self._fail(self.after)
        return total


def drawn(rank: int, patience: timedelta = PATIENCE, **fail) -> tuple[Summed, list[str]]:
    """What one who draws sees of two forwards, and of the end."""
    part, errors = Summed(dist.new_group([0, 1]), **fail), []
    company = together.Together([part], Layout(sequence=2), torch.device("cpu"), torch.no_grad, [part.group], patience)

    def tried(what) -> None:
        try:
            what()
        except Exception as error:  # noqa: BLE001
            errors.append(f"{type(error).__name__}: {' '.join(str(error).split())}")

    def rollout() -> None:
        with company.running():
            for _ in range(2 if rank == 0 else 0):
                tried(lambda: part(torch.ones(2), others={"mask": [torch.tensor([True])], "text": 3}, kind="a"))

    tried(rollout)
    return part, errors


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    sys.stderr = open(os.path.join(folder, f"said_by_{rank}"), "w", buffering=1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "meet"), 2))
    part, errors = drawn(rank, together.PATIENCE)
    assert not errors and len(part.seen) == 2
    one, others, kind = part.seen[1]
    assert one.tolist() == [1, 1] and others["mask"][0].tolist() == [True] and (others["text"], kind) == (3, "a")
    assert "forward" not in vars(part)

    # Each time the second forward is refused at once. What others do not compute is told by the one that draws alone.
    told = {
        (1,): [f"RuntimeError: {TOLD}"] * 2,
        (0,): ["ValueError: rank 0 cannot", f"RuntimeError: {TOLD.replace('rank 1', 'rank 0')}"],
        (0, 1): [None, None],  # whoever is first
    }
    for fail, expected in told.items():
        part, errors = drawn(rank, fail=fail)
        assert len(part.seen) == 1, part.seen
        if rank:
            assert errors == []
        else:
            assert len(errors) == 2
            assert all(want in (None, error) for want, error in zip(expected, errors, strict=True)), errors
            assert all("cannot" in error for error in errors)
        dist.barrier()  # the ranks' other groups are whole

    # Without memory after the last thing that others wait for: told by whatever comes next, with the knobs.
    _, errors = drawn(rank, fail=(1,), after=True, memory=True)
    if rank == 0:
        assert 1 <= len(errors) <= 2 and all(e.startswith("OutOfMemoryError: rank 1 failed") for e in errors), errors
        assert "lower actor_rollout_ref.rollout.max_num_seqs" in errors[0]
    else:
        assert errors == []
    dist.barrier()
    dist.destroy_process_group()


def test_a_rank_that_fails_is_named_and_nobody_waits_for_it(tmp_path):
    start_ranks(rank_main, (str(tmp_path),))
    said = (tmp_path / "said_by_1").read_text()
    assert TOLD in said and "FutureWarning" not in said
