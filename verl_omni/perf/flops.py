"""How much arithmetic the transformer does, counted by torch's own counter on tensors without memory."""

import concurrent.futures
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from verl_omni.perf.known_values import KnownValues, is_telling
from verl_omni.utils.call_signature import argument_names, by_name

# Dense bfloat16 peaks by the vendors' data sheets, in FLOP/s.
PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "B200": 2250e12,
}


def peak_flops() -> float | None:
    """Of the GPU here; None where it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in PEAKS.items() if known in name), None)


class FlopMeter:
    """Counts the rows that go through the transformers, and knows what a row costs with and without a gradient."""

    def __init__(self, parts: Iterable[torch.nn.Module]):
        self._rows: dict[tuple, int] = {}
        self._costs: dict[tuple, concurrent.futures.Future] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._failed = False
        for part in parts:
            part.register_forward_pre_hook(self._count, with_kwargs=True)

    def take(self, ranks: int = 1) -> float | None:
        """FLOPs of this rank since the last call, where so many had a share of each row; None as long as a cost is not
        known."""
        rows, self._rows = self._rows, {}
        if self._failed or not all(self._costs[key].done() for key in rows):
            return None
        error = next((self._costs[key].exception() for key in rows if self._costs[key].exception()), None)
        if error is not None:
            self._failed = True
            warnings.warn(f"perf/mfu and perf/tflops are left out: {error}", stacklevel=2)
            return None
        return sum(count * self._costs[key].result() for key, count in rows.items()) / ranks

    def _count(self, part: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        grad = torch.is_grad_enabled()
        given = by_name(part, args, kwargs)
        rows = len(given[argument_names(part)[0]])
        one_row = {k: _first_row(v, rows) for k, v in given.items()}
        key = (id(part), grad, _shapes(one_row))
        if key not in self._costs:
            adapter = getattr(part, "peft_config", {}).get("default")
            empty = tree_map_only(torch.Tensor, without_features, one_row)
            call = (_written_class(part), dict(part.config), adapter, empty, grad)
            self._costs[key] = self._thread.submit(count_in_a_process, call)
        self._rows[key] = self._rows.get(key, 0) + rows


def count_in_a_process(call: tuple) -> float:
    """`count_flops` apart from the training process, where one thread at a time can run python."""
    command = [sys.executable, "-m", "verl_omni.perf.flops"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, input=pickle.dumps(call), capture_output=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"the FLOPs of {call[0].__name__} cannot be counted: {done.stderr.decode()[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def _written_class(part: torch.nn.Module) -> type:
    """The class as it is written: FSDP gives a sharded module one of its own, which no other process can find."""
    from torch.distributed.fsdp import FSDPModule

    return next(cls for cls in type(part).__mro__ if not issubclass(cls, FSDPModule))


def _first_row(value: Any, rows: int) -> Any:
    return value[:1] if isinstance(value, torch.Tensor | list) and len(value) == rows else value


def count_flops(cls: type, config: dict[str, Any], adapter: Any, kwargs: dict[str, Any], backward: bool) -> float:
    """FLOPs of one call with tensors of these shapes; with `backward`, of its gradient too."""
    from accelerate import init_empty_weights
    from diffusers.models.modeling_utils import no_init_weights
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    mode = KnownValues()
    kwargs = tree_map_only(torch.Tensor, mode.like, kwargs)
    with no_init_weights(), init_empty_weights():  # tables of positions are there
        twin = cls.from_config(config)
        if adapter is not None:
            twin.requires_grad_(False)
            twin.add_adapter(adapter)
    with mode, sdpa_kernel(SDPBackend.MATH), torch.set_grad_enabled(backward):  # the counter knows its products
        twin.to_empty(device="cpu")
        with FlopCounterMode(display=False) as counter:
            output = twin(**kwargs)
            if backward:
                first = output[0] if isinstance(output, tuple) else output.sample
                first = torch.stack(list(first)) if isinstance(first, list) else first
                first.float().sum().backward()
    return float(counter.get_total_flops())


def without_features(tensor: torch.Tensor) -> torch.Tensor:
    """A shape, and those values by which a model decides what to compute."""
    tensor = tensor.detach().float() if tensor.is_floating_point() else tensor
    return tensor.cpu() if is_telling(tensor) else torch.empty_like(tensor, device="meta")


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return tuple((k, _shapes(v)) for k, v in sorted(value.items()))
    if isinstance(value, list | tuple):
        return tuple(_shapes(v) for v in value)
    return value if isinstance(value, int | float | str | bool | None) else type(value).__name__


if __name__ == "__main__":
    print(count_flops(*pickle.load(sys.stdin.buffer)))
