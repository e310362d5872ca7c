"""What a compiled block keeps, without memory and without running it, is what it keeps when it runs."""

import functools

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from verl_omni.perf.live_bytes import LiveBytes, PretendedGpu
from verl_omni.trainer.forecast.partitioned import Partitioned
from verl_omni.workers.engine.compile.memory_budget import within_budget


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(16), torch.nn.Linear(16, 128), torch.nn.Linear(64, 16)

    def forward(self, hidden_states):
        value, gate = self.up(self.norm(hidden_states)).chunk(2, dim=-1)
        return hidden_states + self.down(torch.nn.functional.gelu(value) * gate.transpose(0, 1).transpose(0, 1))


@pytest.fixture(autouse=True)
def to_the_byte(monkeypatch):
    monkeypatch.setattr("verl_omni.perf.live_bytes.GRAIN", 1)


def test_a_block_keeps_as_much_as_on_a_cpu():
    block, x = Block(), torch.randn(2, 8, 16, requires_grad=True)
    run = aot_function(
        lambda weights, x: torch.func.functional_call(block, weights, (x,)),
        fw_compiler=nop,
        bw_compiler=nop,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),
    )
    output = run(dict(block.named_parameters()), x)
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in (*output.grad_fn.saved_tensors, output)}
    for given in (x, *block.parameters()):
        kept.pop(given.untyped_storage().data_ptr(), None)
    assert len(kept) > 2

    gpu, holder = PretendedGpu(), torch.nn.ModuleList([block])
    given = gpu.like(x.detach())
    with gpu.here():
        holder.to_empty(device=gpu.device)
        with Partitioned({("blocks",): [(holder, "0")]}):
            for _ in range(2):  # the second time nothing is traced
                with LiveBytes() as live:
                    output = holder[0](given)
                    assert live.now == sum(storage.nbytes() for storage in kept.values())
                    del output


@pytest.mark.parametrize("budget", [0.3, 0.7])
def test_within_a_budget_it_keeps_what_the_compiler_keeps(budget):
    """Of weights in float32 that are all trained, autocast makes copies, which dynamo has made again."""
    block, x = Block(), torch.randn(2, 64, 16, requires_grad=True)
    partitioner = functools.partial(within_budget(budget), compiler="inductor")
    backend = aot_autograd(
        fw_compiler=nop, bw_compiler=nop, partition_fn=partitioner, decompositions=select_decomp_table()
    )
    with torch.autocast("cpu", torch.bfloat16):
        output = torch.compile(block, backend=backend)(x)
    there = {one.untyped_storage().data_ptr() for one in (x, *block.parameters())}
    saved = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in (*output.grad_fn.saved_tensors, output)}
    kept = sum(storage.nbytes() for place, storage in saved.items() if place not in there)

    gpu, holder = PretendedGpu(), torch.nn.ModuleList([block])
    given = gpu.like(x.detach())
    with gpu.here(), Partitioned({("blocks",): [(holder, "0")]}, budget), gpu.autocast(torch.bfloat16):
        holder.to_empty(device=gpu.device)
        with LiveBytes() as live:
            output = holder[0](given)
            assert live.now == kept
