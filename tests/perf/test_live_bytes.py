"""Bytes in use are counted as torch's own allocator would, on real tensors and on those of a GPU that is not there."""

import torch

from verl_omni.perf.live_bytes import LiveBytes, PretendedGpu

MIB = 2**20


def test_what_is_made_counts_until_nobody_holds_it():
    given = torch.zeros(MIB // 4)
    with LiveBytes() as live:
        made = given + 1
        view = made[10:].view(-1)
        made.mul_(2)
        assert (live.now, live.most) == (MIB, MIB)
        other = made + made.new_zeros(1)  # which is gone after its use
        assert (live.now, live.most) == (2 * MIB, 2 * MIB + 512)
        del made
        assert live.now == 2 * MIB  # the view holds it
        del view
        assert live.now == MIB
        live.forget(other)
        assert live.now == 0


def test_a_gpu_that_is_not_there_computes_in_the_dtype_of_autocast():
    gpu = PretendedGpu()
    with gpu.here():
        layer = torch.nn.Linear(64, 64)
        rows = torch.empty(8, 64)
        with gpu.autocast(torch.bfloat16):
            out = layer(rows)
            normed = torch.nn.functional.layer_norm(out, (64,))
        assert (out.dtype, normed.dtype) == (torch.bfloat16, torch.float32)
        assert layer(rows).dtype == torch.float32
