"""What is on by default on a GPU, on every architecture: compiled blocks, compiling ahead, counting FLOPs."""

import functools
import io
import pickle

import pytest
from engine_cases import loss_function, make_engine, model_config, roll_out, update
from tiny_models import tiny_checkpoint

from verl_omni.perf import flops
from verl_omni.workers.engine import base
from verl_omni.workers.engine.compile import compile_ahead
from verl_omni.workers.engine.compile.blocks import compile_blocks

PIPELINES = [
    "QwenImagePipeline", "StableDiffusion3Pipeline", "FluxPipeline", "Flux2KleinPipeline", "ZImagePipeline",
    "WanPipeline",
]  # fmt: skip


class Here:
    """In place of another process: its work is kept, to be done by the test."""

    def __init__(self, *_, **__):
        self.returncode = 0

    def communicate(self, job: bytes) -> tuple[None, bytes]:
        self.job = job
        return None, b""


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_architecture(pipeline, monkeypatch):
    monkeypatch.setattr(base, "compile_blocks", functools.partial(compile_blocks, backend="eager"))
    monkeypatch.setattr(compile_ahead.subprocess, "Popen", Here)
    monkeypatch.setattr(compile_ahead, "compiled_by_mode", lambda block, backend: block.forward)
    counted = []
    # torch's counter hooks into all modules of its process: here it has to wait until nothing else runs
    monkeypatch.setattr(flops, "count_in_a_process", lambda call: counted.append(pickle.dumps(call)) or 1.0)
    kinds = []
    started = compile_ahead.compile_ahead
    monkeypatch.setattr(base, "compile_ahead", lambda *a: kinds.extend(started(*a)))

    config = model_config(tiny_checkpoint(pipeline), lora=True)
    config.pipeline.num_frames = 1 if pipeline == "WanPipeline" else None
    engine = make_engine(config, use_torch_compile=True, compile_ahead=True, fused_gelu=True)
    meter = flops.FlopMeter(engine.parts.values())
    data = roll_out(engine, per_prompt=3)
    update(engine, data, loss_function(), steps=1)
    meter._thread.shutdown(wait=True)
    assert meter.take() > 0 and counted
    assert all(flops.count_flops(*pickle.loads(call)) > 0 for call in counted)
    assert kinds
    for kind in kinds:
        kind.sent.join()
        compile_ahead.run(pickle.load(io.BytesIO(kind.process.job)))
