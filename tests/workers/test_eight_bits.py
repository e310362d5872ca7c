"""Frozen weights in 8 bits: what is held, and that all else is as with a model that has those numbers."""

import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    PROMPTS,
    assert_same,
    loss_function,
    make_engine,
    make_rollout,
    model_config,
    part,
    requests,
    roll_out,
    update,
    weights,
)
from ranks import start_ranks
from tiny_models import tiny_checkpoint

from verl_omni.pipelines.builtin import BUILTIN
from verl_omni.workers.engine import eight_bits
from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.engine.eight_bits import Linear8Bit, quantised, restored, weight_of

INT8 = {"lora": True, "cfg": True, "base_precision": "int8"}
QWEN = "QwenImagePipeline"
# The others' transformers take no LoRA, or are those of one that is here, and begin with an image.
OTHERS = {
    "AceStepPipeline", "LongCatAudioDiTPipeline", "FluxKontextPipeline", "LTX2ImageToVideoPipeline",
    "QwenImageEditPlusPipeline", "WanImageToVideoPipeline",
}  # fmt: skip


@pytest.fixture
def any_side(monkeypatch):
    """Tiny-random Wan is 24 wide."""
    monkeypatch.setattr(eight_bits, "GROUP", 4)


def layers(engine) -> dict[str, Linear8Bit]:
    return {n: m for n, m in engine.module.named_modules() if isinstance(m, Linear8Bit)}


def test_a_layer_with_a_forward_of_its_own_stays_as_it_is():
    """The 8 bits' would take its place: half of what it gives were twice as much."""

    class Halving(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) / 2

    plain, own = torch.nn.Linear(64, 8), Halving(64, 8)
    part = torch.nn.Module()
    part._repeated_blocks, part.blocks = ["Sequential"], torch.nn.ModuleList([torch.nn.Sequential(plain, own)])
    eight_bits.hold_in_8_bits([part], torch.float32)
    assert isinstance(plain, Linear8Bit) and type(own) is Halving and own.weight.dtype == torch.float32


# ---- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1.0, 1e-6, 1e6])
def test_a_weight_is_off_by_half_a_unit_of_its_group(spread):
    """A unit is the group's largest over 127; bfloat16 rounds that by 2^-8 of itself at most."""
    rows = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)) * spread
    rows[:, 3] *= 30  # a column stands out: others of its group pay, and nobody else
    whole, scales = quantised(rows)
    assert whole.dtype == torch.int8 and scales.shape == (32, 4) and scales.dtype == torch.bfloat16
    groups = rows.double().unflatten(-1, (4, 64))
    held = whole.double().unflatten(-1, (4, 64)) * scales.double()[..., None]
    unit = groups.abs().amax(-1, keepdim=True) / 127
    assert ((held - groups).abs() <= unit / 2 * (1 + 2.0**-7)).all()
    assert (held - groups)[:, 1:].norm() / groups[:, 1:].norm() < 0.007  # e4m3 with a scale a row has .026
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(restored(whole, scales, dtype), held.flatten(1).to(dtype)), "rounded once"


def test_zeros_stay_and_what_is_not_finite_is_not_hidden():
    rows = torch.zeros(3, 128)
    rows[1, 0], rows[2, 0] = torch.nan, torch.inf
    found = restored(*quantised(rows), torch.float32)
    assert found[0].eq(0).all() and found[1:, 64:].eq(0).all() and not found[1:, :64].isfinite().any()


# ---- a model -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BUILTIN if name not in OTHERS])
def test_it_trains_as_a_model_with_those_weights(name, any_side):
    """Linear layers of torch, in full, with the numbers that 8 bits can hold: the same images, gradients and update."""
    config = model_config(tiny_checkpoint(name), **INT8)
    config.pipeline.num_frames = 1 if name == "WanPipeline" else None
    held = make_engine(config)
    plain = make_engine(model_config(config.path, lora=True, cfg=True))
    plain.model_config.pipeline.num_frames = config.pipeline.num_frames
    found, frozen = layers(held), dict(plain.module.named_modules())
    assert found and sum(p.numel() for m in found.values() for p in [m.weight]) > 0.5 * sum(
        m.weight.numel() for part in plain.parts.values() for b in repeated_blocks(part) for n, m in b.named_modules()
        if isinstance(m, torch.nn.Linear) and ".lora_" not in n
    )  # fmt: skip
    for path, layer in found.items():
        assert not torch.equal(frozen[path].weight, weight_of(layer))
        frozen[path].weight.data = weight_of(layer)
    batch = roll_out(plain)
    assert_same(roll_out(held), batch, atol=0)
    results = [update(engine, batch, loss_function(kl=0.0)) for engine in (held, plain)]
    assert results[0] == results[1]
    assert_same(weights(held), weights(plain), atol=0)


def test_backward_keeps_nothing_but_the_eight_bits():
    engine = make_engine(model_config(tiny_checkpoint(QWEN), **INT8))
    layer = next(iter(layers(engine).values()))
    kept = []
    x = torch.randn(3, 5, layer.in_features, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    assert {t.dtype for t in kept if t.shape == layer.weight.shape} == {torch.int8}
    assert not any(t.is_floating_point() for t in kept if t.numel() >= layer.weight.numel())
    (found,) = torch.autograd.grad(out.square().sum(), x)
    exact = 2 * (x.double() @ weight_of(layer).double().t() + layer.bias.double()) @ weight_of(layer).double()
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


def test_in_bfloat16_autocast_chooses_as_for_other_layers():
    layer = torch.nn.Linear(64, 8)
    plain = torch.nn.Linear(64, 8, dtype=torch.bfloat16)
    eight_bits._convert(layer)
    plain.load_state_dict({"weight": weight_of(layer).bfloat16(), "bias": layer.bias.bfloat16()})
    x = torch.randn(2, 3, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain(x)) and layer(x).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiler_sees_one_graph_forward_and_backward(dtype):
    layer, x = torch.nn.Linear(64, 128), torch.randn(2, 5, 64, requires_grad=True)
    layer.requires_grad_(False)
    eight_bits._convert(layer)
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = call(x)
        assert out.dtype == dtype
        found.append((out, *torch.autograd.grad(out.float().square().sum(), x)))
    assert all(map(torch.equal, *found))


# ---- several ranks -------------------------------------------------------------------------------------


def one_of_two_ranks(rank: int, folder: str, path: str) -> None:
    torch.set_num_threads(1)
    eight_bits.GROUP = 4
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/meet", 2))
    engine = make_engine(model_config(path, **INT8), param_offload=True)
    shares = [(layer.weight.to_local(), layer.weight_scales.to_local()) for layer in layers(engine).values()]
    rows = [layer.weight.shape[0] for layer in layers(engine).values()]
    assert rows and [2 * len(w) for w, _ in shares] == rows
    assert all(w.dtype == torch.int8 and len(w) == len(s) for w, s in shares)
    drawn = []
    for gathered in (engine.whole, engine.by_blocks):
        with engine.eval_mode(), gathered():
            outputs = (rollout := make_rollout(engine)).run_batch(requests(rollout, PROMPTS))
        drawn.append(torch.stack([output.response for output in outputs]))
    assert torch.equal(*drawn)
    update(engine, part(torch.load(f"{folder}/batch.pt"), slice(rank, None, 2)), loss_function())
    torch.save({"drawn": drawn[0]} | weights(engine), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_hold_half_each_and_do_as_one(tmp_path, process_group, any_side):
    path = str(tiny_checkpoint(QWEN))
    engine = make_engine(model_config(path, **INT8))
    batch = roll_out(engine)
    torch.save(batch, tmp_path / "batch.pt")
    with engine.eval_mode():
        outputs = (rollout := make_rollout(engine)).run_batch(requests(rollout, PROMPTS))
    start_ranks(one_of_two_ranks, (str(tmp_path), path))
    update(engine, batch, loss_function())
    alone = {"drawn": torch.stack([output.response for output in outputs])} | weights(engine)
    for rank in (0, 1):
        assert_same(torch.load(tmp_path / f"{rank}.pt"), alone, atol=1e-6)
