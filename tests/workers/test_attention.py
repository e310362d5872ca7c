"""The attention kernel that was asked for is the one that runs, whether or not a model asks diffusers for it."""

import contextlib
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine_cases import model_config
from tiny_language_model import language_model_folder
from tiny_models import tiny_checkpoint
from torch.nn.attention import _fa4
from torch.utils._python_dispatch import TorchDispatchMode

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.causal_lm import CAUSAL_LM, CausalLM
from verl_omni.pipelines.flux.adapter import Flux
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.base import DiffusionEngine
from verl_omni.workers.engine.compile import attention_kernels, attention_trial
from verl_omni.workers.engine.compile.attention import attention_choice, choose_attention
from verl_omni.workers.engine.compile.attention_kernels import FLASH_4
from verl_omni.workers.engine.compile.attention_trial import Shape, Tried, shape_of, try_kernels
from verl_omni.workers.engine.compile.blocks import compile_blocks, repeated_blocks
from verl_omni.workers.engine.compile.compile_ahead import skeleton

FUSED = "_scaled_dot_product_flash_attention_for_cpu"
MODELS = ["StableDiffusion3Pipeline", "QwenImagePipeline"]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def transformer(pipeline: str) -> torch.nn.Module:
    config = model_config(tiny_checkpoint(pipeline))
    return DiffusionModelBase.get_class(config).load_module(config, torch.float32)


def attend(module: torch.nn.Module) -> set[str]:
    """The operations of one block's attention."""
    block = repeated_blocks(module)[0]
    width = block.attn.to_q.in_features
    with torch.no_grad(), Operations() as seen:
        block.attn(hidden_states=torch.ones(1, 4, width), encoder_hidden_states=torch.ones(1, 3, width))
    return seen.names


@pytest.fixture(autouse=True)
def diffusers_default():
    """diffusers remembers the last choice for all models."""
    yield
    transformer(MODELS[0]).set_attention_backend("native")


@pytest.mark.parametrize("pipeline", MODELS)
def test_the_kernel_that_was_asked_for(pipeline):
    module = transformer(pipeline)
    assert FUSED in attend(module)
    choose_attention(module, "_native_math")
    assert FUSED not in attend(module)


@pytest.mark.parametrize(
    ("pipeline", "asked", "device", "chosen", "why"),
    [
        ("FluxPipeline", None, "cuda", "_native_flash", "what works for Flux on a GPU"),
        ("FluxPipeline", None, "cpu", None, "diffusers' default"),
        ("FluxPipeline", "_native_cudnn", "cuda", "_native_cudnn", "asked for by actor_rollout_ref.actor.engine"),
        ("FluxPipeline", "native", "cuda", "native", "asked for"),
        ("QwenImagePipeline", None, "cuda", None, "diffusers' default"),
        ("QwenImagePipeline", "flash", "cpu", "flash", "asked for"),
    ],
)
def test_what_is_chosen_and_why(pipeline, asked, device, chosen, why):
    adapter = DiffusionModelBase.get_class(model_config(tiny_checkpoint(pipeline)))
    backend, reason = attention_choice(asked, adapter, torch.device(device), torch.bfloat16)
    assert backend == chosen and reason.startswith(why)


def test_the_models_own_kernel_is_one_that_it_can_have():
    module = transformer("FluxPipeline")
    choose_attention(module, Flux.attention_backend)
    backends = {m.processor._attention_backend for m in module.modules() if getattr(m, "processor", None)}
    assert backends == {"_native_flash"}


def test_in_a_graph_and_in_another_process():
    """Both keep it: the graph has torch's plain products, and the copy for compiling ahead asks for the same."""
    torch._dynamo.reset()
    module = transformer(MODELS[0])
    choose_attention(module, "_native_math")
    copied = pickle.loads(pickle.dumps(skeleton(repeated_blocks(module)[0])))
    assert copied.attn.processor.backend == "_native_math"
    compile_blocks({"transformer": module}, backend="aot_eager")
    block = repeated_blocks(module)[0]
    width = block.attn.to_q.in_features
    with torch.no_grad(), Operations() as seen:
        block(torch.ones(1, 4, width), torch.ones(1, 3, width), torch.ones(1, width))
    assert "bmm" in seen.names and FUSED not in seen.names


@pytest.mark.parametrize("pipeline", MODELS)
def test_flash_attention_4_takes_the_place_of_torchs_flash(pipeline, monkeypatch):
    """Of a model that asks diffusers for its kernel, and of one that calls torch. (Its kernels need a GPU.)"""
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for function in ("_flash_attn_fwd", "_flash_attn_bwd"):
        setattr(sys.modules["flash_attn.cute.interface"], function, None)
    module = transformer(pipeline)
    try:
        choose_attention(module, FLASH_4)
        assert torch.nn.attention.current_flash_attention_impl() == "FA4"
        assert "_scaled_dot_product_flash_attention_for_cpu" in attend(module)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        _fa4._fa4_import_module.cache_clear()


def test_flash_attention_4_that_is_not_there():
    with pytest.raises(ImportError, match='No module named.*pip install "flash-attn-4==4.0.0b18"'):
        choose_attention(transformer(MODELS[0]), FLASH_4)
    (one,) = try_kernels(SMALL, "cpu", torch.bfloat16, (FLASH_4,))
    assert not one.passes and "pip install" in one.failed


def test_a_kernel_that_the_model_cannot_have():
    with pytest.raises(ValueError, match="flex cannot be used with SD3Transformer2DModel.*native, _native_cudnn"):
        choose_attention(transformer(MODELS[0]), "flex")


def test_a_kernel_for_16_bits_is_not_chosen_for_float32():
    from verl_omni.pipelines.flux import Flux

    assert attention_choice(None, Flux, torch.device("cuda"), torch.float32)[0] is None
    assert attention_choice(None, Flux, torch.device("cuda"), torch.bfloat16)[0] == "_native_flash"


# ---- tried at start-up, in another process

SMALL = Shape(rows=2, tokens=300, heads=2, width=16)


def test_kernels_are_tried_forward_and_backward_and_what_is_missing_says_so():
    own, flash, math, absent = try_kernels(
        SMALL, "cpu", torch.float32, ("native", "_native_flash", "_native_math", "_native_cudnn")
    )
    assert own.passes and flash.passes and math.passes and own.off < 1e-4 and own.ms > 0
    assert not absent.passes and absent.failed


def test_a_kernel_that_ends_its_process_is_out_and_the_others_go_on(monkeypatch, tmp_path):
    program = tmp_path / "kernels.py"
    program.write_text(
        "import json, os, sys\n"
        "for kernel in json.loads(sys.argv[1])[3]:\n"
        "    if kernel == 'bad': os._exit(139)\n"
        "    off = 0.5 if kernel == 'wrong' else 0.001\n"
        "    print(json.dumps({'kernel': kernel, 'off': off, 'ms': 1.0}), flush=True)\n"
    )
    monkeypatch.setattr(attention_kernels, "__file__", str(program))
    found = try_kernels(SMALL, "cpu", torch.bfloat16, ("native", "bad", "wrong", "fast"))
    assert [(one.kernel, one.passes) for one in found] == [
        ("native", True), ("bad", False), ("wrong", False), ("fast", True)
    ]  # fmt: skip
    assert "ended its process (exit code 139)" in str(found[1]) and str(found[2]) == "wrong: off by 50.0%"


@pytest.mark.parametrize(("ms", "chosen"), [(4.0, "_native_efficient"), (4.95, None)])
def test_torchs_own_choice_is_left_only_for_a_clear_gain(monkeypatch, ms, chosen):
    found = [Tried("native", 0.001, 5.0), Tried("_native_efficient", 0.001, ms), Tried("_native_cudnn", 0.3, 1.0)]
    monkeypatch.setattr(attention_trial, "try_kernels", lambda *given: found)
    backend, why = attention_trial.best_attention(SMALL, "cuda", torch.bfloat16)
    assert backend == chosen and "tried with 2 x 300 tokens, 2 heads of 16: native 5.00 ms" in why


@pytest.mark.parametrize("pipeline", ["QwenImagePipeline", "StableDiffusion3Pipeline", "ZImagePipeline", "WanPipeline"])
def test_the_shapes_are_the_models_own(pipeline):
    config = model_config(tiny_checkpoint(pipeline))
    adapter = DiffusionModelBase.get_class(config)
    shape = shape_of(config, adapter)
    attention = repeated_blocks(adapter.build_module(config, torch.float32))[-1]
    attention = next(m for m in attention.modules() if hasattr(m, "to_q"))
    assert shape.heads * shape.width == attention.to_q.out_features and shape.tokens >= adapter.tokens(config)


@pytest.mark.parametrize("kernel", attention_trial.KERNELS)
def test_what_is_tried_takes_the_mask_of_a_shorter_prompt(kernel):
    """diffusers refuses one with some kernels, whatever the device; what the device lacks is for the trial to find."""
    module = transformer("QwenImagePipeline")
    choose_attention(module, kernel)
    image, text = torch.ones(1, 4, module.config.in_channels), torch.ones(1, 3, module.config.joint_attention_dim)
    shorter = torch.tensor([[True, True, False]])
    with contextlib.suppress(RuntimeError):  # not on a CPU
        module(image, text, shorter, torch.ones(1), img_shapes=[[(1, 2, 2)]])


def test_a_language_model_is_not_asked_for_a_diffusion_transformer(monkeypatch):
    """Only a GPU is tried on: the engine is told that it has one."""
    monkeypatch.setattr(attention_trial, "try_kernels", lambda *given: pytest.fail("there is nothing to try"))
    engine = SimpleNamespace(
        common=SimpleNamespace(attention_backend=None),
        adapter=CausalLM,
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        model_config=DiffusionModelConfig(path=str(language_model_folder()), architecture=CAUSAL_LM),
    )
    backend, why = DiffusionEngine._choose_attention(engine)
    assert backend is None and why.startswith("diffusers' default")
