"""A memory budget changes what compiled blocks keep between forward and backward, and nothing that they compute."""

import functools
import pickle
import shutil
import subprocess

import pytest
import torch
import torch._inductor.config as inductor
from engine_cases import OPTIM, disturb, loss_function, model_config, roll_out
from tiny_models import tiny_checkpoint, tiny_sd3_transformer
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_omni.config import CheckpointConfig, EngineConfig, FSDPConfig, OptimizerConfig
from verl_omni.workers.engine import base
from verl_omni.workers.engine.compile import blocks
from verl_omni.workers.engine.compile import compile_ahead as ahead
from verl_omni.workers.engine.compile.adapters_together import adapters_together
from verl_omni.workers.engine.compile.blocks import compile_blocks, compiled_by_mode, repeated_blocks
from verl_omni.workers.engine.compile.compile_ahead import CompileAhead, compile_ahead
from verl_omni.workers.engine.compile.memory_budget import WithinBudget, within_budget
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine

aten = torch.ops.aten
KEPT = (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_cudnn_attention)


def partitioner(budget: float):
    return functools.partial(within_budget(budget) if budget < 1 else min_cut_rematerialization_partition,
                             compiler="inductor")  # fmt: skip


class Parted:
    """A backend of dynamo that parts as inductor does, and runs the parts as they are."""

    def __init__(self, budget: float):
        self.backward: list[torch.fx.Graph] = []
        self.backend = aot_autograd(
            fw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
            bw_compiler=self._keep,
            partition_fn=partitioner(budget),
            decompositions=select_decomp_table(),
        )

    def _keep(self, graph: torch.fx.GraphModule, inputs):
        self.backward.append(graph.graph)
        return make_boxed_func(graph.forward)

    def products(self) -> int:
        """How many matrix products the backwards have."""
        return sum(node.target in (aten.mm.default, aten.addmm.default) for g in self.backward for node in g.nodes)


def passed(module: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
    """Of a forward and a backward: velocity, gradients, and bytes that lay between the two."""
    generator, saved = torch.Generator().manual_seed(1), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        velocity = module(
            hidden_states=torch.randn(4, 4, 16, 16, generator=generator),
            timestep=torch.linspace(300.0, 700.0, 4),
            encoder_hidden_states=torch.randn(4, 5, 16, generator=generator),
            pooled_projections=torch.randn(4, 16, generator=generator),
            return_dict=False,
        )[0]
    module.zero_grad()
    velocity.square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return velocity.detach(), gradients, sum(saved.values())


def test_blocks_keep_less_and_compute_the_same():
    """In float32: the forward bit for bit, gradients but for the order of sums. Less is kept, and more computed."""
    kept, products = [], []
    for budget in (1.0, 0.2):
        torch._dynamo.reset()
        torch.manual_seed(0)
        module = tiny_sd3_transformer(num_layers=1)
        parted = Parted(budget)
        compile_blocks({"transformer": module}, backend=parted.backend)
        velocity, gradients, between = passed(module)
        kept.append(between)
        products.append(parted.products())
        if budget == 1:
            expected = velocity, gradients
        assert torch.equal(velocity, expected[0])
        torch.testing.assert_close(gradients, expected[1], rtol=1e-5, atol=1e-6)
    assert kept[1] < 0.8 * kept[0] and products[1] > products[0]


def backward_of(function, *inputs: torch.Tensor, budget: float) -> torch.fx.Graph:
    parts = []
    compiled = aot_function(
        function,
        fw_compiler=lambda graph, given: make_boxed_func(graph.forward),
        bw_compiler=lambda graph, given: parts.append(graph.graph) or make_boxed_func(graph.forward),
        partition_fn=partitioner(budget),
        decompositions=select_decomp_table(),
    )
    compiled(*inputs).sum().backward()
    return parts[0]


@pytest.mark.parametrize("kernel", KEPT, ids=str)
def test_attention_is_not_computed_again(kernel):
    """Of whichever kernel: torch's partitioner would take cuDNN's for free. What goes into it is computed again."""

    def attend(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = (hidden @ weight).view(2, 256, 3, 4, 64).permute(2, 0, 3, 1, 4).sin()
        more = (None, True) if kernel is aten._scaled_dot_product_cudnn_attention else ()
        output = kernel(*heads.unbind(0), *more)[0].transpose(1, 2).reshape(2, 256, 256)
        return (output.sin() @ weight[:, :256]).sin()

    with FakeTensorMode():
        hidden = torch.zeros(2, 256, 256, dtype=torch.bfloat16, requires_grad=True)
        graph = backward_of(attend, hidden, torch.zeros(256, 768, dtype=torch.bfloat16), budget=0.01)
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    assert kernel.default not in called
    assert sum(target is aten.mm.default for target in called) > 2, "products of the forward beside the gradient's two"


def test_what_is_drawn_is_drawn_once():
    """torch's partitioner alone draws another mask for the backward (pytorch/pytorch#190758)."""
    compiled = aot_function(
        lambda rows, weight: torch.nn.functional.dropout(rows @ weight, 0.5),
        fw_compiler=lambda graph, given: make_boxed_func(graph.forward),
        partition_fn=partitioner(0.01),
        decompositions=select_decomp_table(),
    )
    rows, weight = torch.rand(64, 8, requires_grad=True), torch.rand(8, 512)
    output = compiled(rows, weight)
    output.sum().backward()
    passed_on = (output.detach() != 0).float()
    assert 0.4 < passed_on.mean() < 0.6
    torch.testing.assert_close(rows.grad, 2 * passed_on @ weight.T)


@pytest.mark.parametrize("budget", [1.0, 0.5])
def test_only_graphs_with_a_gradient_have_it(budget, monkeypatch):
    """All blocks share one partitioner, as dynamo takes another compiler's graphs for others."""
    asked = []
    monkeypatch.setattr(
        blocks.torch, "compile", lambda call, backend, options: asked.append((call.__name__, options)) or call
    )
    for block in repeated_blocks(tiny_sd3_transformer(num_layers=2)):
        compiled_by_mode(block, "inductor", budget)
    first, second = dict(asked[:3]), dict(asked[3:])
    expected = {"joint_custom_post_pass": adapters_together()}
    expected |= {"custom_partitioner_fn": within_budget(0.5)} if budget < 1 else {}
    assert first["forward_with_gradient"] == second["forward_with_gradient"] == expected
    assert first["forward_without_gradient"] is None and "custom_partitioner_fn" not in first["forward_in_fp8"]


def test_kernels_on_disk_are_found_by_it():
    assert within_budget(0.5).uuid() != within_budget(0.3).uuid()
    again: WithinBudget = pickle.loads(pickle.dumps(within_budget(0.5)))  # inductor's key has its settings pickled
    assert (again.budget, again.uuid()) == (0.5, within_budget(0.5).uuid())


def engine_within(budget: float, **common) -> DiffusersFSDPEngine:
    settings = EngineConfig(use_torch_compile=True, activation_memory_budget=budget, fused_gelu=False, **common)
    config = model_config(tiny_checkpoint(), lora=True)
    engine = DiffusersFSDPEngine(config, FSDPConfig(), OptimizerConfig(**OPTIM), CheckpointConfig(), common=settings)
    engine.initialize()
    disturb(engine)
    return engine


def test_the_engine_hands_it_on_to_those_that_compile_ahead_too(process_group, monkeypatch):
    told = []
    monkeypatch.setattr(base, "compile_blocks", lambda parts, budget: told.append(budget))
    monkeypatch.setattr(base, "compile_ahead", lambda *given: told.append(given[-1]))
    engine_within(0.25, compile_ahead=True)
    assert told == [0.25, 0.25]


def test_a_job_of_compiling_ahead_has_it(monkeypatch):
    jobs, popen = [], subprocess.Popen
    waits = ["sh", "-c", "cat > /dev/null"]
    monkeypatch.setattr(ahead.subprocess, "Popen", lambda command, **options: popen(waits, **options))
    monkeypatch.setattr(CompileAhead, "_send", lambda self, job: jobs.append(job))
    module = tiny_sd3_transformer(num_layers=1)
    (kind,) = compile_ahead([module], lambda: 3, None, None, 0.25)
    with torch.no_grad():
        block = repeated_blocks(module)[0]
        width = block.attn.to_q.in_features
        block(torch.ones(2, 4, width), torch.ones(2, 3, width), torch.ones(2, width))
    kind.sent.join()
    kind.process.communicate(b"")
    assert [job.budget for job in jobs] == [0.25]


@pytest.mark.slow  # dynamo traces a model's blocks twice
def test_the_first_ratio_stays_one(process_group, monkeypatch):
    """Of graphs without a gradient, in float32."""
    torch._dynamo.reset()
    parted = Parted(0.3)
    monkeypatch.setattr(base, "compile_blocks", functools.partial(compile_blocks, backend=parted.backend))
    engine = engine_within(0.3)
    data = roll_out(engine)
    with engine.train_mode():
        first = engine.train_batch(data, loss_function())["metrics"]
    assert first["ratio_max_dev"] <= 1e-6 and parted.backward


@pytest.mark.slow  # a real compiler
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles for a CPU with g++")
def test_kernels_of_inductor_compute_the_same(tmp_path, monkeypatch):
    """And the cache keeps those of another budget apart: the second time it finds its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    found = {}
    with inductor.patch({"cpp.vec_isa_ok": False}):
        for budget in (1.0, 0.3, 0.3):
            torch._dynamo.reset()
            counters.clear()
            torch.manual_seed(0)
            module = tiny_sd3_transformer(("attn.to_q", "attn.add_q_proj"), num_layers=1)
            compile_blocks({"transformer": module}, budget=budget)
            velocity, gradients, between = passed(module)
            again = budget in found
            caches = counters["inductor"]
            assert (caches["fxgraph_cache_hit"], caches["fxgraph_cache_miss"]) == ((2, 0) if again else (0, 2))
            found[budget] = velocity, gradients, between
    torch.testing.assert_close(found[0.3][0], found[1.0][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0.3][1], found[1.0][1], rtol=1e-5, atol=1e-6)
    assert found[0.3][2] < found[1.0][2]
