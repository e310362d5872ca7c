"""Where the device's time goes in one training step, by kind of kernel."""

import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# The first kind whose words occur in a kernel's name has it.
KINDS = {
    "compiled element-wise": ("triton_",),
    "attention": ("flash", "fmha", "attention", "sdpa", "cudnn_generated_fort_native"),
    "matrix products": ("gemm", "nvjet", "cutlass", "matmul", "addmm", "aten::mm", "aten::bmm"),
    "convolutions": ("conv", "implicit", "xmma", "wgrad", "dgrad"),
    "copies": ("memcpy", "memset", "aten::copy_", "aten::clone", "aten::cat", "CatArray"),
}
OTHER = "other"


class StepProfile:
    """Started before a step and stopped after it; `stop` writes a summary and a trace for a browser."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        activity = ProfilerActivity.CUDA if self.on_gpu else ProfilerActivity.CPU
        self._profile = profile(activities=[activity])

    def start(self) -> None:
        self._profile.start()
        self._began = time.perf_counter()

    def stop(self, folder: Path) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - self._began
        self._profile.stop()
        self._profile.export_chrome_trace(str(folder / "profile.json.gz"))
        events = self._profile.profiler.kineto_results.events()
        spans = [
            (e.name(), e.start_ns() / 1e9, e.end_ns() / 1e9)
            for e in events
            if self.on_gpu == (e.device_type() == torch.autograd.DeviceType.CUDA)
        ]
        # Kernels do not nest, and adding them up is quick; torch takes a minute for those of a large step.
        kernels = totals(spans) if self.on_gpu else [
            (e.key, e.self_cpu_time_total / 1e6, e.count) for e in self._profile.key_averages()
        ]  # fmt: skip
        (folder / "profile.txt").write_text(summary(kernels, wall) + gaps(spans))


def totals(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, int]]:
    """(name, seconds, calls) of every kernel."""
    seconds, calls = Counter(), Counter()
    for name, start, stop in spans:
        seconds[name] += stop - start
        calls[name] += 1
    return [(name, seconds[name], calls[name]) for name in seconds]


def gaps(spans: Iterable[tuple[str, float, float]], longest: int = 15) -> str:
    """When nothing ran for a millisecond or more, and what ran before and after; `spans` as (name, start, end)."""
    found, end, before, first = [], None, "", None
    for name, start, stop in sorted(spans, key=lambda s: s[1]):
        first = start if first is None else first
        if end is not None and start - end >= 1e-3:
            found.append((start - end, end - first, before, name))
        if end is None or stop > end:
            end, before = stop, name
    idle = sum(gap[0] for gap in found)
    lines = ["", f"{idle:8.3f} s  in {len(found)} gaps of a millisecond or more between kernels; the longest:"]
    for length, at, name, following in sorted(found, reverse=True)[:longest]:
        lines.append(f"{length:8.3f} s  at {at:8.3f} s, after {name[:50]}, before {following[:50]}")
    return "\n".join(lines) + "\n"


def kind_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in KINDS.items() if any(w.lower() in name for w in words)), OTHER)


def summary(kernels: Iterable[tuple[str, float, int]], wall: float, longest: int = 25) -> str:
    """`kernels` as (name, seconds, calls): seconds of each kind against the wall clock, and the longest kernels."""
    kernels = sorted(kernels, key=lambda k: -k[1])
    kinds: dict[str, float] = {}
    for name, seconds, _ in kernels:
        kinds[kind_of(name)] = kinds.get(kind_of(name), 0.0) + seconds
    busy = sum(kinds.values())
    lines = [f"{wall:8.3f} s  the step", f"{busy:8.3f} s  in kernels ({busy / wall:.1%})"]
    lines += [f"{s:8.3f} s  {s / wall:6.1%}  {kind}" for kind, s in sorted(kinds.items(), key=lambda k: -k[1])]
    lines += ["", "the longest:"]
    lines += [f"{s:8.3f} s {calls:7d} x  {name[:120]}" for name, s, calls in kernels[:longest]]
    return "\n".join(lines) + "\n"
