"""Ranks that share a model draw with it block by block what each would draw with the whole of it, to the last bit."""

import os

import pytest
import torch
import torch.distributed as dist
from engine_cases import PROMPTS, STEPS, make_engine, make_rollout, model_config, requests
from ranks import start_ranks
from tiny_models import tiny_checkpoint
from torch.distributed.tensor import DTensor

from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.engine.fsdp.in_step import InStep
from verl_omni.workers.layout import Layout

pytestmark = pytest.mark.timeout(240)

# Batches of each rank. With guidance, prompts of one length need one forward a step, those of two lengths two.
BATCHES = {0: [[PROMPTS[0]], [PROMPTS[1], PROMPTS[0]], [PROMPTS[1]]], 1: [[PROMPTS[0], PROMPTS[0], PROMPTS[1]]]}


def drawn(rollout, batches: list[list[str]]) -> list[torch.Tensor]:
    """Of every sample its image and all that training needs."""
    found = []
    for first_seed, prompts in enumerate(batches):
        kept = {"keep_trajectory": True, "sde_window": (0, STEPS - 1)}
        for output in rollout.run_batch(requests(rollout, prompts, first_seed, **kept)):
            found += [output.response, *output.trajectory.values(), *output.conditions.values()]
    return found


def gathered_at_once(engine) -> list[int]:
    """How many blocks this rank holds whole while another one computes, from now on."""
    seen, (part,) = [], engine.parts.values()
    blocks = list(repeated_blocks(part))

    def look(*_):
        seen.append(sum(not isinstance(next(block.parameters()), DTensor) for block in blocks))

    for block in blocks:
        block.register_forward_pre_hook(look)  # after FSDP's own
    return seen


def drawn_apart(rank: int) -> float:
    """Ranks that hold a copy each do not wait for one another: the second draws when the first has drawn."""
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 2.0)
    apart = InStep([layer], torch.device("cpu"), Layout(replicate=dist.get_world_size()))
    for turn in range(2):
        if turn == rank:
            with apart.running():
                made = layer(torch.tensor([2.0])).item()
        dist.barrier()
    return made


def rank_main(rank: int, folder: str, path: str, lora: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "meet"), 2))
    engine = make_engine(model_config(path, cfg=True, lora=lora))
    rollout = make_rollout(engine)
    with engine.eval_mode(), engine.whole():
        whole = drawn(rollout, BATCHES[rank])
    seen = gathered_at_once(engine)
    for batches in (BATCHES[rank], BATCHES[rank] if rank else []):  # then one of them has nothing to draw
        with engine.eval_mode(), engine.by_blocks():
            again = drawn(rollout, batches)
        same = whole if batches else []
        assert len(again) == len(same) and all(map(torch.equal, again, same))
    assert not seen or max(seen) == 1
    assert all(isinstance(p, DTensor) for p in engine.module.parameters())
    assert drawn_apart(rank) == 4.0
    torch.save(whole[0], os.path.join(folder, f"{rank}.pt"))
    dist.destroy_process_group()


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_block_by_block_is_what_the_whole_model_draws(tmp_path, process_group, lora):
    start_ranks(rank_main, (str(tmp_path), tiny_checkpoint(), lora))
    engine = make_engine(model_config(tiny_checkpoint(), cfg=True, lora=lora))
    with engine.eval_mode(), engine.by_blocks():  # one rank holds all of it
        alone = drawn(make_rollout(engine), BATCHES[0])
    assert torch.equal(alone[0], torch.load(tmp_path / "0.pt", weights_only=True))
