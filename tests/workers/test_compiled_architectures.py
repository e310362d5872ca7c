"""Compiled blocks, compiling ahead and counting FLOPs on every architecture: traced as for a GPU, run eagerly."""

import dataclasses
import functools
import pickle
import subprocess

import pytest
import torch
from engine_cases import loss_function, make_engine, model_config, roll_out, update
from tiny_models import tiny_checkpoint
from torch.utils._pytree import tree_map_only

from verl_omni.perf import flops
from verl_omni.utils.call_signature import by_name
from verl_omni.workers.engine import base
from verl_omni.workers.engine.compile import compile_ahead
from verl_omni.workers.engine.compile.blocks import compile_blocks, repeated_blocks
from verl_omni.workers.engine.fsdp.shard import shard_alone

# Rows of a micro-batch, of 18: the first architecture has a second one, of another size.
MICRO_BATCH = {"QwenImagePipeline": 16, "StableDiffusion3Pipeline": 18}
OTHERS = dict.fromkeys(("FluxPipeline", "Flux2KleinPipeline", "ZImagePipeline", "WanPipeline"), 18)
AMONG_RANKS = functools.partial(shard_alone, dtype=torch.float32)


@pytest.fixture
def kinds(monkeypatch, tmp_path) -> list:
    """The kinds of blocks that are compiled ahead. Their processes keep what they are sent: the file `job<i>`."""
    found, popen, start = [], subprocess.Popen, compile_ahead.compile_ahead

    def keeps(command, **options):
        process = popen(["sh", "-c", f"cat > {tmp_path}/job{keeps.started}"], **options)
        keeps.started += 1
        return process

    keeps.started = 0
    monkeypatch.setattr(compile_ahead.subprocess, "Popen", keeps)
    monkeypatch.setattr(base, "compile_ahead", lambda *arguments: found.extend(start(*arguments)))
    return found


def shapes(call: dict) -> dict:
    """Of all tensors among the arguments, or of what stands for them."""
    tensors = (torch.Tensor, compile_ahead.Input)
    return {name: tree_map_only(tensors, lambda t: (tuple(t.shape), t.dtype), value) for name, value in call.items()}


@pytest.mark.parametrize("pipeline", [*MICRO_BATCH, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_architecture(pipeline, monkeypatch, tmp_path, kinds):
    monkeypatch.setattr(base, "compile_blocks", functools.partial(compile_blocks, backend="eager"))
    counted = []
    # torch's counter hooks into all modules of its process: here it has to wait until nothing else runs
    monkeypatch.setattr(flops, "count_in_a_process", lambda call: counted.append(pickle.dumps(call)) or 1.0)

    config = model_config(tiny_checkpoint(pipeline), lora=True)
    config.pipeline.num_frames = 1 if pipeline == "WanPipeline" else None
    engine = make_engine(config, use_torch_compile=True, compile_ahead=True, fused_gelu=True)
    engine.micro_batch_size = (MICRO_BATCH | OTHERS)[pipeline]
    trained = []  # calls of blocks in the update
    for block in (block for part in engine.parts.values() for block in repeated_blocks(part)):
        block.register_forward_pre_hook(
            lambda block, args, kwargs: (
                trained.append((type(block), shapes(by_name(block, args, kwargs)))) if torch.is_grad_enabled() else None
            ),
            with_kwargs=True,
        )
    meter = flops.FlopMeter(engine.parts.values())
    data = roll_out(engine, per_prompt=3)
    update(engine, data, loss_function(), steps=1)

    meter._thread.shutdown(wait=True)
    assert meter.take() > 0 and counted
    assert all(flops.count_flops(*pickle.loads(call)) > 0 for call in counted)
    assert kinds
    for i, kind in enumerate(kinds):
        kind.sent.join()
        assert kind.failure is None
        job = pickle.loads((tmp_path / f"job{i}").read_bytes())
        assert (type(job.block), shapes(job.kwargs)) in trained, "what is compiled ahead is what the update calls"
        compile_ahead.run(job, backend="eager")
        job.block.to("meta")
        compile_ahead.run(dataclasses.replace(job, spread=AMONG_RANKS), backend="eager")
