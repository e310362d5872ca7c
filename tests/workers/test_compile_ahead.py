"""The update's graphs come from the cache: other processes compiled them while the rollout ran."""

import functools
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from diffusers import SD3Transformer2DModel
from engine_cases import loss_function, make_engine, model_config, roll_out, update
from ranks import start_ranks
from tiny_models import tiny_checkpoint, tiny_sd3_transformer
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.sampling import halves
from verl_omni.workers.engine import base
from verl_omni.workers.engine.compile import compile_ahead as ahead
from verl_omni.workers.engine.compile.blocks import choose_cache, compile_blocks
from verl_omni.workers.engine.compile.compile_ahead import CompileAhead, compile_ahead
from verl_omni.workers.engine.fsdp.shard import shard, shard_alone


@pytest.fixture
def module() -> SD3Transformer2DModel:
    torch._dynamo.reset()
    return tiny_sd3_transformer(num_layers=1)


def run(module: torch.nn.Module, rows: int) -> None:
    velocity = module(
        hidden_states=torch.randn(rows, 4, 8, 8),
        timestep=torch.linspace(300.0, 700.0, rows),
        encoder_hidden_states=torch.randn(rows, 5, 16),
        pooled_projections=torch.randn(rows, 16),
        return_dict=False,
    )[0]
    if velocity.requires_grad:
        velocity.square().sum().backward()


@pytest.fixture
def quick_compiler(tmp_path, monkeypatch) -> Iterator[None]:
    """g++ without its optimizations, for this process and those that it starts: it is all the same who is asked."""
    compiler = tmp_path / "quick-g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -O0\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    with inductor.patch({"cpp.cxx": (None, str(compiler)), "cpp.vec_isa_ok": False}):
        yield


@pytest.mark.slow  # a real compiler; test_compiled_architectures.py has what is sent to it
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for a CPU with g++")
def test_the_update_finds_its_graphs(spread, module, tmp_path, monkeypatch, quick_compiler):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    alone = functools.partial(shard_alone, dtype=torch.float32) if spread else None
    (kind,) = compile_ahead([module], lambda: 3, None, alone)
    compile_blocks({"transformer": module})
    if spread:
        shard({"transformer": module}, init_device_mesh("cpu", (1,)), torch.float32, reshard=True)
    with torch.no_grad():
        run(module, rows=2)
    counters.clear()
    run(module, rows=3)
    assert kind.failure is None
    assert counters["inductor"]["fxgraph_cache_hit"] == 2  # forward and backward
    assert counters["inductor"]["fxgraph_cache_miss"] == 0


def rank_finds_its_graphs(rank: int, folder: Path, path: str, lora: bool) -> None:
    """What inductor's cache said during the first update, of a rank of two."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    started, start = [], base.compile_ahead
    base.compile_ahead = lambda *arguments: started.extend(start(*arguments))
    settings = {"use_torch_compile": True, "compile_ahead": True, "fused_gelu": False}
    engine = make_engine(model_config(path, lora=lora), **settings)
    engine.micro_batch_size = 6
    data = roll_out(engine, per_prompt=1, keep_uncond=True)  # else the update would compile a forward of that half
    counters.clear()
    update(engine, data, loss_function(), steps=1)
    told = {"kinds": len(started), "failures": [kind.failure for kind in started], **counters["inductor"]}
    (folder / f"rank{rank}.json").write_text(json.dumps(told))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for a CPU with g++")
def test_of_two_ranks_one_compiles_ahead(lora, tmp_path, monkeypatch, quick_compiler):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    start_ranks(rank_finds_its_graphs, (tmp_path, str(tiny_checkpoint("StableDiffusion3Pipeline")), lora))
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["failures"] == [None] * first["kinds"] and first["kinds"] > 0 and second["kinds"] == 0
    assert first["fxgraph_cache_hit"] == 2 * first["kinds"]  # all that was compiled ahead: forward and backward
    assert first.get("fxgraph_cache_miss", 0) == 0


def test_the_rollout_begins_with_the_half_that_is_trained():
    """Its prompt has another length than the negative one, and the first call says which graphs the update needs."""
    lengths = []

    class Adapter(DiffusionModelBase):
        @classmethod
        def forward(cls, module, inputs):
            lengths.append(inputs["text"].shape[1])
            return inputs["text"].sum(1)

    positive, negative = {"text": torch.ones(2, 7)}, {"text": torch.ones(2, 3)}
    cond, uncond = halves(Adapter, torch.nn.Identity(), positive, negative, one_forward=True)
    assert lengths == [7, 3]
    assert (cond["velocity"][0], uncond["velocity"][0]) == (7, 3)


def test_without_work_it_ends_by_itself(module):
    (kind,) = compile_ahead([module], lambda: 3, None)
    kind.process.communicate(b"")
    assert kind.process.returncode == 0


@pytest.fixture
def no_compiler(monkeypatch) -> None:
    """Processes that only wait for their work and then fail."""
    popen = subprocess.Popen
    fails = ["sh", "-c", "cat > /dev/null; echo no compiler >&2; exit 1"]
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda command, **options: popen(fails, **options))


@pytest.fixture
def waiting(module, no_compiler) -> CompileAhead:
    return compile_ahead([module], lambda: 3, None)[0]


def test_one_process_for_each_kind(no_compiler):
    module = tiny_sd3_transformer(num_layers=5, dual_attention_layers=(0, 1))
    kinds = compile_ahead([module], lambda: 3, None)
    assert len({kind.process.pid for kind in kinds}) == len(kinds) == 3
    for kind in kinds:
        kind.process.communicate(b"")


def test_without_a_rollout_nothing_waits(module, waiting):
    run(module, rows=3)
    assert waiting.process.wait() == -9


def test_failing_is_told_and_does_not_end_the_run(module, waiting):
    with torch.no_grad():
        run(module, rows=2)
    with pytest.warns(UserWarning, match="no compiler"):
        run(module, rows=3)
    run(module, rows=3)


def test_one_that_never_ends_is_ended_and_told(module, monkeypatch):
    popen, (read, write) = subprocess.Popen, os.pipe()
    compiler = f"cat /dev/fd/{read} &"  # it has the process's own pipes too, and goes on without it
    stuck = ["sh", "-c", f"{compiler} cat > /dev/null; wait"]
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda command, **options: popen(stuck, pass_fds=[read], **options))
    monkeypatch.setattr(ahead, "LIMIT", 0.1)
    try:
        (kind,) = compile_ahead([module], lambda: 3, None)
        with torch.no_grad():
            run(module, rows=2)
        with pytest.warns(UserWarning, match="it took longer than 0.1 s"):
            run(module, rows=3)
        assert kind.process.returncode == -9
    finally:
        os.close(read)
        os.close(write)


def test_the_process_leaves_no_group_behind(monkeypatch):
    """What NCCL says at the end of one would stand in the place of the error."""
    ended = []
    monkeypatch.setattr(ahead, "start_compilers", lambda: None)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(pickle.dumps(None))))  # no job: it fails
    monkeypatch.setattr(dist, "destroy_process_group", lambda: ended.append(dist.is_initialized()))
    with pytest.raises(AttributeError):
        ahead.main()
    assert ended == [True]


def test_a_block_that_no_other_process_can_find_is_told_too(module, waiting):
    waiting.skeleton = lambda: None
    with torch.no_grad():
        run(module, rows=2)
    with pytest.warns(UserWarning, match="compile_ahead=false"):
        run(module, rows=3)
    assert waiting.process.wait() == -9


def test_inputs_are_those_of_the_update(module, waiting):
    call = {"hidden_states": torch.zeros(2, 16, 16), "encoder_hidden_states": torch.zeros(2, 5, 16),
            "temb": torch.zeros(2, 16), "rope": (torch.zeros(16, 4),), "flag": None}  # fmt: skip
    found = waiting._as_in_the_update(call, rows=2)
    assert found["hidden_states"] == ahead.Input((3, 16, 16), torch.float32, True)
    assert found["encoder_hidden_states"] == ahead.Input((3, 5, 16), torch.float32, True)
    assert found["temb"] == ahead.Input((3, 16), torch.float32, False)
    assert found["rope"] == (ahead.Input((16, 4), torch.float32, False),)
    assert found["flag"] is None


@pytest.fixture
def nothing_chosen(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # as it is now, it comes back
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")


def test_kernels_are_kept_in_the_users_cache_folder(tmp_path, monkeypatch, capsys, nothing_chosen):
    monkeypatch.setenv("HOME", str(tmp_path))
    for chosen, expected in ((None, ".cache"), (tmp_path / "elsewhere", "elsewhere")):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(chosen or ""))
        choose_cache()
        folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert folder == tmp_path / expected / "verl_omni/inductor" and folder.is_dir()
        assert [f.stat().st_mode & 0o777 for f in (folder, folder.parent)] == [0o700, 0o700]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    choose_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine" and not capsys.readouterr().err


def test_what_torch_chooses_when_it_is_imported_is_nobodys_choice(tmp_path):
    """`import torch._dynamo` names its own folder below /tmp, and every worker has imported it by then."""
    code = "import os, torch._dynamo as d; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])\n"
    code += "from verl_omni.workers.engine.compile.blocks import choose_cache as c; c(); c()\n"
    code += "print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"
    environ = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    environ |= {"XDG_CACHE_HOME": str(tmp_path)}
    made = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    before, after = made.stdout.split()
    assert before != after == str(tmp_path / "verl_omni/inductor")


def test_a_cache_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch, capsys, nothing_chosen):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    choose_cache()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    assert f"{tmp_path / 'file'}/verl_omni/inductor cannot be written" in capsys.readouterr().err


def test_nobody_else_writes_where_kernels_are_found(tmp_path, monkeypatch, capsys, nothing_chosen):
    """They run. A folder of an earlier version is closed; one that belongs to somebody else is left alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "verl_omni"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    choose_cache()
    said = f"{folder} belongs to another user, and what is found there runs. TORCHINDUCTOR_CACHE_DIR names another"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ and said in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    choose_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor") and not capsys.readouterr().err
    assert folder.stat().st_mode & 0o777 == 0o755
