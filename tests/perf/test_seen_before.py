"""What is remembered of an operation is what torch says of it."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_omni.perf.known_values import KnownValues

aten = torch.ops.aten


def of_all_kinds(wide: torch.Tensor, narrow: torch.Tensor) -> list[torch.Tensor]:
    """A block's operations, and those whose outputs are told by something else than shapes."""
    made = [
        torch.nn.functional.linear(wide, narrow),
        *torch.native_layer_norm(wide, [4], None, None, 1e-5),
        *wide.chunk(2, dim=1),
        wide.transpose(0, 1),
        wide.transpose(0, 1).contiguous().flatten(),
        aten._unsafe_view(wide, [12, 4]),
        wide[:, 1:].detach(),
        torch.cat([wide, wide], dim=1),
        wide.bfloat16() * narrow[0, 0],
        *(narrow.long() + one for one in (1, 1.0, True)),
        torch.polar(wide, wide) * 2,
        wide.add_(1.0),
    ]
    torch.set_default_dtype(torch.float64)
    try:
        return [*made, narrow.long() + 1.0]
    finally:
        torch.set_default_dtype(torch.float32)


def told(mode: FakeTensorMode, times: int) -> list[list[tuple]]:
    found = []
    with mode, torch.no_grad():
        wide, narrow = torch.empty(2, 6, 4), torch.empty(4, 4)
        for _ in range(times):
            made = of_all_kinds(wide, narrow)
            memory = [wide.untyped_storage()._cdata, *(one.untyped_storage()._cdata for one in made)]
            found.append([
                (one.shape, one.stride(), one.storage_offset(), one.dtype, one.untyped_storage().nbytes(), one is wide,
                 memory.index(one.untyped_storage()._cdata))
                for one in made
            ])  # fmt: skip
    return found


def test_the_second_time_is_as_the_first_time_is_as_torch_has_it():
    (expected,) = told(FakeTensorMode(), 1)
    assert told(KnownValues(), 3) == [expected] * 3


def test_most_is_asked_of_torch_only_once(monkeypatch):
    asked, dispatch = [], FakeTensorMode.dispatch
    monkeypatch.setattr(FakeTensorMode, "dispatch", lambda self, *call: asked.append(call[0]) or dispatch(self, *call))
    mode, counts = KnownValues(), []
    with mode:
        x, weight = torch.empty(2, 6, 4), torch.empty(4, 4)
        for _ in range(2):
            asked.clear()
            torch.nn.functional.gelu(torch.nn.functional.linear(x, weight)).view(2, 24).add_(1)
            counts.append(sum(func is not torch.ops.prim.device.default for func in asked))  # a question, no operation
    assert counts[0] >= 4 and counts[1] == 0


def test_a_number_of_rows_that_a_mask_tells_is_not_remembered():
    mode = KnownValues()
    features = mode.like(torch.ones(3, 4))
    masks = [torch.tensor(mask) for mask in ([True, False, True], [False, False, True])]
    chosen = [mode.like(mask) for mask in masks]
    with mode:
        assert [len(features[mask]) for mask in chosen] == [2, 1]
