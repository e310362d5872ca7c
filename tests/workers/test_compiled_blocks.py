"""Blocks that repeat are compiled once for each kind, with and without a gradient, and compute what they did before."""

import time

import pytest
import torch
from diffusers import QwenImageTransformer2DModel, SD3Transformer2DModel
from tiny_models import tiny_checkpoint, tiny_sd3_transformer

from verl_omni.workers.engine.compile.blocks import compile_blocks
from verl_omni.workers.engine.compile.clock import clock
from verl_omni.workers.engine.compile.fused_gelu import fuse_gelu


@pytest.fixture
def module() -> SD3Transformer2DModel:
    """Five blocks of three kinds: two with a second attention, two without, and the last, which drops the text."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    return tiny_sd3_transformer(
        ("attn.to_q", "attn.add_q_proj"), num_layers=5, dual_attention_layers=(0, 1), qk_norm="rms_norm"
    )


def run(module: torch.nn.Module, rows: int = 2) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    velocity = module(
        hidden_states=torch.randn(rows, 4, 8, 8, generator=generator),
        timestep=torch.linspace(300.0, 700.0, rows),
        encoder_hidden_states=torch.randn(rows, 5, 16, generator=generator),
        pooled_projections=torch.randn(rows, 16, generator=generator),
        return_dict=False,
    )[0]
    module.zero_grad()
    if velocity.requires_grad:
        velocity.square().sum().backward()
    return velocity.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.fixture
def graphs() -> list[torch.fx.GraphModule]:
    return []


@pytest.fixture
def backend(graphs):
    """Runs what dynamo has traced as it is, and counts it."""

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    return keep


def test_one_graph_for_each_kind(module, graphs, backend):
    velocity, gradients = run(module)
    compile_blocks({"transformer": module}, backend=backend)
    with torch.no_grad():
        torch.testing.assert_close(run(module)[0], velocity)
    assert len(graphs) == 3
    compiled_velocity, compiled_gradients = run(module)
    assert len(graphs) == 6
    torch.testing.assert_close(compiled_velocity, velocity)
    torch.testing.assert_close(compiled_gradients, gradients)

    module.enable_gradient_checkpointing()
    torch.testing.assert_close(run(module)[1], gradients)
    assert len(graphs) == 6


def test_seconds_of_the_compiler_are_counted(module):
    def slow(graph, example_inputs):
        time.sleep(0.2)
        return graph.forward

    before = clock.seconds()
    compile_blocks({"transformer": module}, backend=slow)
    run(module)
    taken = clock.seconds() - before
    assert taken > 3 * 0.2  # three kinds of blocks
    run(module)
    assert clock.seconds() - before == taken


def sizes(graph: torch.fx.GraphModule) -> list[int | torch.SymInt]:
    inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    return [size for value in inputs if isinstance(value, torch.Tensor) for size in value.shape]


def test_rollout_and_update_have_sizes_of_their_own(graphs, backend):
    """A graph for any size is slower: it is for a second size of the same kind of call, not for the other kind."""
    torch._dynamo.reset()
    module = tiny_sd3_transformer(("attn.to_q", "attn.add_q_proj"), num_layers=1)
    compile_blocks({"transformer": module}, backend=backend)
    with torch.no_grad():
        run(module, rows=2)
    run(module, rows=3)
    assert len(graphs) == 2
    assert all(isinstance(size, int) for graph in graphs for size in sizes(graph))
    run(module, rows=4)
    assert any(isinstance(size, torch.SymInt) for graph in graphs[2:] for size in sizes(graph))
    count = len(graphs)
    run(module, rows=5)
    assert len(graphs) == count


def test_every_block_gets_rows_that_lie_side_by_side(module):
    """The patch embedding's transposed view would make each norm of each block read its rows in strides."""
    compile_blocks({"transformer": module}, backend="eager")
    seen = []
    for block in module.transformer_blocks:
        block.norm1.register_forward_pre_hook(lambda _, args: seen.append(args[0].is_contiguous()))
    with torch.no_grad():
        run(module)
    assert seen == [True] * len(module.transformer_blocks)


def test_gelu_inside_the_product(module, graphs, backend):
    """In one graph a kind, only without a gradient. A CPU's GELU is the exact one, 5e-4 from the approximation."""
    module.to(torch.bfloat16)
    for parameter in module.parameters():
        parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    with torch.autocast("cpu", torch.bfloat16):
        velocity, gradients = run(module)
        fuse_gelu(module)
        compile_blocks({"transformer": module}, backend=backend)
        with torch.no_grad():
            fused, _ = run(module)
        assert len(graphs) == 3
        assert all("_addmm_activation" in graph.code for graph in graphs)
        torch.testing.assert_close(fused, velocity, atol=0.03, rtol=0.03)
        _, compiled_gradients = run(module)
    assert len(graphs) == 6
    assert not any("_addmm_activation" in graph.code for graph in graphs[3:])
    torch.testing.assert_close(compiled_gradients, gradients, atol=0.02, rtol=0.05)


def test_prompts_of_any_length_share_their_graphs(graphs, backend):
    """With padding and without: one graph for the first length, one for all others, one more where the mask was new."""
    torch._dynamo.reset()
    module = QwenImageTransformer2DModel.from_pretrained(tiny_checkpoint(), subfolder="transformer").eval()

    @torch.no_grad()
    def run(tokens: int, padded: bool) -> torch.Tensor:
        generator = torch.Generator().manual_seed(tokens)
        mask = torch.ones(2, tokens, dtype=torch.bool)
        mask[0, tokens // 2 :] = False
        return module(
            hidden_states=torch.randn(2, 16, module.config.in_channels, generator=generator),
            timestep=torch.tensor([0.3, 0.7]),
            img_shapes=[[(1, 4, 4)]] * 2,
            encoder_hidden_states=torch.randn(2, tokens, module.config.joint_attention_dim, generator=generator),
            encoder_hidden_states_mask=mask if padded else None,
            return_dict=False,
        )[0]

    calls = [(tokens, padded) for tokens in (11, 35, 28, 17, 40, 5) for padded in (False, True)]
    expected = [run(*call) for call in calls]
    compile_blocks({"transformer": module}, backend=backend)
    counts = []
    for call, velocity in zip(calls, expected, strict=True):
        torch.testing.assert_close(run(*call), velocity)
        counts.append(len(graphs))
    assert counts == [1, 2, 3] + [4] * 9
