"""Linear layers in 8 bits: how far off they may be, what draws with them, and what is exact all the same."""

import dataclasses
import functools
import re

import pytest
import torch
from engine_cases import (
    assert_same,
    disturb,
    loss_function,
    make_engine,
    make_rollout,
    model_config,
    requests,
    roll_out,
    update,
    weights,
)
from tiny_models import tiny_checkpoint
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from verl_omni.pipelines.builtin import BUILTIN
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine import base, fp8
from verl_omni.workers.engine.compile.blocks import compile_blocks, repeated_blocks
from verl_omni.workers.engine.compile.graphs import share
from verl_omni.workers.engine.compile.in_eight_bits import in_eight_bits
from verl_omni.workers.engine.fp8 import E4M3, Fp8Layers, chosen_layers, layers_of, product, quantised, refuse_old_gpu
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

CPU = torch.device("cpu")
SD3 = "StableDiffusion3Pipeline"


def lora(name: str = "QwenImagePipeline", **model):
    return model_config(tiny_checkpoint(name), cfg=True, lora=True, **model)


# ---- numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spread", [1.0, 1e-6, 1e6])
def test_a_value_is_off_by_a_sixteenth_at_most(spread):
    """e4m3 has 3 bits after the point: half a unit of the last is 2^-4 of the value. Below 2^-6 units are 2^-9."""
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * spread
    rows[:, :4] *= 30  # some stand out, as they do in real activations
    values, scale = quantised(rows)
    assert values.dtype == E4M3 and scale.shape == (64, 1) and scale.dtype == torch.float32
    exact, held = rows.double(), values.double() * scale.double()
    allowed = torch.maximum(exact.abs() / 16, scale.double() * 2.0**-10)
    assert ((held - exact).abs() <= allowed * (1 + 1e-6)).all()
    torch.testing.assert_close(values.float().abs().amax(1), torch.full((64,), 448.0))  # nothing is given away


def test_zeros_stay_and_nan_is_not_hidden():
    rows = torch.zeros(3, 16)
    rows[1, 0], rows[2, 0] = torch.nan, torch.inf
    found = product(rows, *quantised(torch.ones(16, 16)), None, torch.float32)
    assert found[0].eq(0).all() and not found[1:].isfinite().any()


@pytest.mark.parametrize("shape", [(5, 64, 48), (2, 7, 64, 48)])
def test_a_product_is_within_the_bound_of_its_factors(shape):
    """(1 + 1/16)^2 - 1 of the sum of absolute products, by the triangle inequality, against float64."""
    *lead, inner, outer = shape
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(*lead, inner, generator=generator), torch.randn(outer, inner, generator=generator)
    bias = torch.randn(outer, generator=generator)
    found = product(x, *quantised(weight), bias, torch.float32).double()
    exact = x.double() @ weight.double().t() + bias.double()
    allowed = ((17 / 16) ** 2 - 1) * (x.double().abs() @ weight.double().abs().t()) + 1e-4
    assert found.shape == exact.shape and ((found - exact).abs() <= allowed).all()
    assert (found - exact).norm() / exact.norm() < 0.05  # and in the mean far less: errors cancel


def test_what_a_small_step_of_lora_adds_arrives():
    """Frozen weights lie anywhere between two values of 8 bits, so that as many cross a boundary as should."""
    generator = torch.Generator().manual_seed(2)
    frozen = (torch.randn(1024, 1024, generator=generator) * 0.02).bfloat16().float()
    added = torch.randn(1024, 4, generator=generator) @ torch.randn(4, 1024, generator=generator) * 1e-5
    held = [values.float() * scale for values, scale in map(quantised, (frozen, frozen + added))]
    assert added.norm() / frozen.norm() < 2e-3
    assert ((held[1] - held[0]) * added).sum() / added.square().sum() == pytest.approx(1, abs=0.15)


# ---- layers --------------------------------------------------------------------------------------------


# modulations, embeddings of text and time, and the images that some of Wan's models begin with
FEW_TOKENS = ("norm", "mod", "adaln", "embed", "proj_in", "attn2.add_")
EMBEDDED = {"proj", "text_proj"}  # of CogView4, whose embedding of patches is a block to diffusers


@pytest.fixture
def any_side(monkeypatch):
    """Tiny-random Wan is 24 wide, and Z-Image's MLP 85."""
    monkeypatch.setattr(fp8, "MULTIPLE", 1)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_architecture_declares_its_layers(name, any_side):
    """All of them are there, and of its blocks' linear layers only few that see few tokens are not among them."""
    config = model_config(tiny_checkpoint(name))
    adapter = DiffusionModelBase.get_class(config)
    assert "fp8_modules" in {key for cls in adapter.__mro__[:-2] for key in vars(cls)}, "declared, not inherited"
    with torch.device("meta"):
        module = adapter.build_module(config, torch.float32)
    for part in adapter.trained_modules(module).values():
        ends = {end for block in repeated_blocks(part) for end in adapter.fp8_modules if chosen_layers(block, [end])}
        assert ends == set(adapter.fp8_modules)
        seen = {linear for block in repeated_blocks(part) for linear, _ in chosen_layers(block, adapter.fp8_modules)}
        left = {
            name.split(".", 1)[1]
            for block in repeated_blocks(part)
            for name, m in block.named_modules(prefix="block")
            if isinstance(m, torch.nn.Linear) and m not in seen
        }
        assert all(any(word in name for word in FEW_TOKENS) for name in left - EMBEDDED), left


def drawn(engine, precision=None, **params):
    with engine.whole(precision):
        return roll_out(engine, **params)


OTHERS = ("FluxPipeline", "Flux2KleinPipeline", "ZImagePipeline", "WanPipeline")


@pytest.mark.parametrize(
    "name", ["QwenImagePipeline", SD3, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_what_is_drawn_is_near(name, any_side):
    config = lora(name)
    config.pipeline.num_frames = 1 if name == "WanPipeline" else None
    engine = make_engine(config)
    exact, rough = drawn(engine), drawn(engine, "fp8")
    off = (rough["final_latents"] - exact["final_latents"]).norm() / exact["final_latents"].norm()
    assert 1e-4 < off < 0.2
    again = drawn(engine)
    assert_same(exact, again, atol=0)  # nothing of it stays
    assert not any(hasattr(linear, "fp8_weight") or "forward" in vars(linear) for linear in engine.fp8.linears)


@pytest.mark.parametrize("fold", [False, True])
def test_weights_are_quantised_anew_after_an_update(fold):
    engine = make_engine(lora(), fold_lora=fold)
    before = drawn(engine, "fp8")
    assert_same(before, drawn(engine, "fp8"), atol=0)
    update(engine, drawn(engine), loss_function())
    disturb(engine, 0.2)
    after = drawn(engine, "fp8")
    assert (after["final_latents"] - before["final_latents"]).abs().max() > 1e-3
    fresh = make_engine(lora(), fold_lora=fold)
    for name, value in weights(engine).items():
        fresh.parameters[name].data.copy_(value)
    assert_same(after, drawn(fresh, "fp8"), atol=0)  # as a resumed run has them


@pytest.mark.parametrize("fold", [False, True])
def test_lora_is_in_the_quantised_weights(fold):
    """Whether the other layers' LoRA is folded or not."""
    engine = make_engine(lora(), fold_lora=fold)
    disturb(engine, 1.0)
    frozen = {n: p.clone() for n, p in engine.module.named_parameters()}
    with engine.whole("fp8"):
        for linear, wrapped in engine.fp8.layers:
            meant = linear.weight + wrapped.get_delta_weight("default")
            held = linear.fp8_weight.float() * linear.fp8_scale
            assert wrapped.disable_adapters and (held - meant).norm() / meant.norm() < 0.04
            assert (held - linear.weight).norm() / meant.norm() > 0.1
    assert all(torch.equal(p, frozen[n]) for n, p in engine.module.named_parameters())
    assert not any(wrapped.disable_adapters for _, wrapped in engine.fp8.layers)


def test_the_reference_has_no_lora_in_it():
    engine = make_engine(lora(), fold_lora=True)
    with engine.eval_mode(), engine.policy("reference"), engine.in_precision("fp8"):
        for linear, wrapped in engine.fp8.layers:
            assert wrapped.disable_adapters
            assert torch.equal(linear.fp8_weight.float(), quantised(linear.weight)[0].float())


def test_a_user_names_the_layers():
    engine = make_engine(lora())
    engine.common = dataclasses.replace(engine.common, fp8_modules=["txt_mlp.net.2"])
    blocks = [block for part in engine.parts.values() for block in repeated_blocks(part)]
    assert engine.fp8.linears == {block.txt_mlp.net[2].base_layer for block in blocks}
    with pytest.raises(ValueError, match="no linear layer .* is called to_quite: name those .*, such as attn"):
        Fp8Layers(engine.parts.values(), ["to_q", "to_quite"], CPU, torch.float32)
    wan = make_engine(model_config(tiny_checkpoint("WanPipeline")))
    with pytest.raises(ValueError, match="sides are multiples of 16, and none of this model's are: leave it out"):
        wan.fp8  # noqa: B018


def test_sides_that_tensor_cores_do_not_take_are_left():
    block = torch.nn.ModuleDict({"to_q": torch.nn.Linear(32, 48), "to_k": torch.nn.Linear(32, 40)})
    assert [linear for linear, _ in chosen_layers(block, ["to_q", "to_k"])] == [block["to_q"]]


def test_a_model_without_known_blocks_is_refused():
    with pytest.raises(ValueError, match="of this model diffusers names no blocks"):
        layers_of([], ["to_q"])


def test_an_older_gpu_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match=r"8\.9 or newer .* NVIDIA A100 has 8\.0: leave rollout\.precision"):
        refuse_old_gpu("cuda:0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    refuse_old_gpu("cuda:0")
    refuse_old_gpu("cpu")


# ---- graphs --------------------------------------------------------------------------------------------


def test_compiled_blocks_have_a_graph_of_their_own(monkeypatch):
    """Traced as for a GPU, without a break; after it, those of full precision are as they were."""
    torch._dynamo.reset()
    monkeypatch.setattr(base, "compile_blocks", functools.partial(compile_blocks, backend="eager"))
    plain, compiled = (make_engine(lora(SD3), use_torch_compile=c, fused_gelu=True, fold_lora=True) for c in (0, 1))
    exact = drawn(compiled)
    assert_same(drawn(plain, "fp8"), drawn(compiled, "fp8"), atol=1e-4)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert_same(exact, drawn(compiled), atol=0)
    drawn(compiled, "fp8")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == counted
    assert not torch._dynamo.utils.counters["graph_break"]


def quantisations(graph: torch.fx.Graph) -> int:
    return sum(node.target is torch.ops.aten.amax.default for node in graph.nodes)


@torch.no_grad()
def test_an_input_of_several_layers_is_quantised_once():
    """As a compiler sees a block of SD3: query, key and value have one input, of the image as of the text."""
    engine = make_engine(lora(SD3), fold_lora=True)
    block = repeated_blocks(engine.module)[0]
    names = [name for name, _ in fp8.linears(block)]
    image, text, time = (torch.randn(2, *shape, 32) for shape in ((16,), (5,), ()))
    with engine.whole("fp8"):
        traced = make_fx(lambda *inputs: block(*inputs))(image, text, time)
        plain = traced(image, text, time)
        layers, before = len(chosen_layers(block, engine.adapter.fp8_modules)), quantisations(traced.graph)
        share(traced.graph)
        traced.recompile()
    shared = sum(name.endswith(("to_k", "to_v", "add_k_proj", "add_v_proj")) for name in names)
    assert before == layers and quantisations(traced.graph) == layers - shared and shared >= 4
    assert all(torch.equal(one, other) for one, other in zip(plain, traced(image, text, time), strict=True))


def test_what_is_random_or_written_into_or_returned_is_not_shared():
    def twice(x):
        first, second = torch.rand_like(x), torch.rand_like(x)
        one, other = x + 1, x + 1
        one.mul_(2)
        return first, second, one, other, x.cos(), x.cos().view(9), x.sum(1) * 1, x.sum(1) * 2

    graph = make_fx(twice, tracing_mode="fake")(torch.ones(3, 3))
    share(graph.graph)
    graph.recompile()
    first, second, one, other, returned, viewed, *sums = graph(torch.ones(3, 3))
    assert not torch.equal(first, second) and one.eq(4).all() and other.eq(2).all() and sums[0].eq(3).all()
    assert returned.data_ptr() != viewed.data_ptr()
    assert sum(node.target is torch.ops.aten.sum.dim_IntList for node in graph.graph.nodes) == 1


@pytest.mark.slow  # 30 s: the compiler
def test_the_compiler_shares_it(monkeypatch):
    """Bit for bit what it makes without; one graph for all blocks."""
    made = []
    for options in (None, {"post_grad_custom_pre_pass": in_eight_bits()}):
        torch._dynamo.reset()
        monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
        weights = [quantised(torch.randn(32, 32, generator=torch.Generator().manual_seed(i))) for i in range(3)]

        def several(x, weights=weights):
            x = torch.nn.functional.layer_norm(x, (32,))
            return [product(x, *weight, None, torch.float32) for weight in weights]

        with torch.no_grad():
            x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(3))
            found, (code,) = run_and_get_code(torch.compile(several, options=options), x)
        made.append((found, len(set(re.findall(r"extern_kernels\.mm\((\w+)", code)))))
    assert [count for _, count in made] == [3, 1], "buffers that are multiplied"
    assert all(torch.equal(one, other) for one, other in zip(made[0][0], made[1][0], strict=True))


# ---- a server ------------------------------------------------------------------------------------------


def test_a_server_draws_each_batch_in_the_precision_that_it_names():
    engine = make_engine(lora())
    server = make_engine(lora())
    disturb(server, 0.0)
    rollout = make_rollout(server)
    rollout = DiffusersRollout(rollout.config, server.model_config, server.module, CPU, torch.float32, fp8=server.fp8)
    rollout.update_weights(engine.get_per_tensor_param()[0], version=1)
    ask = functools.partial(roll_out, server, rollout=rollout)
    assert_same(ask(), drawn(engine), atol=1e-6)
    rough = ask(precision="fp8")
    assert_same(rough, drawn(engine, "fp8"), atol=0)
    assert_same(ask(), drawn(engine), atol=1e-6)
    disturb(engine, 1.0)
    rollout.update_weights(engine.get_per_tensor_param()[0], version=2)
    assert (ask(precision="fp8")["final_latents"] - rough["final_latents"]).abs().max() > 1e-3
    assert_same(ask(precision="fp8"), drawn(engine, "fp8"), atol=0)  # as the engine beside training draws


def test_requests_of_two_precisions_share_no_forward():
    rollout = make_rollout(make_engine(lora()))
    asked = [request for params in ({}, {"precision": "fp8"}) for request in requests(rollout, ["a"], **params)]
    assert len({request.kind for request in asked}) == 2
