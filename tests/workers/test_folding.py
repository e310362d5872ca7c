"""Small LoRA updates reach the rollout, whose weights have 8 bits."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    assert_same,
    loss_function,
    make_engine,
    make_rollout,
    model_config,
    moved,
    part,
    roll_out,
    set_weight,
    update,
    weights,
)
from ranks import start_ranks
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine.lora import FoldedLora, base_name, folded, lora_layers
from verl_omni.workers.rollout.vllm_rollout.loading import TrainedWeights

YOUNG = 1e-5  # of B: one step of Adam at that learning rate


def arrives(frozen: torch.Tensor, product: torch.Tensor, weight: torch.Tensor) -> float:
    """The share of the product that is in the weight: a projection of the change on what it should be."""
    change, product = weight.double() - frozen.double(), product.double()
    return ((change * product).sum() / product.square().sum()).item()


def layer(size: float, rows: int = 512, columns: int = 768) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    frozen = (torch.randn(rows, columns, generator=generator) * 0.02).bfloat16()
    product = torch.randn(rows, 8, generator=generator) @ torch.randn(8, columns, generator=generator) / 8**0.5
    return frozen, product * size


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-3, 1e-1])
def test_as_much_arrives_as_was_added(size):
    frozen, product = layer(size)
    kept = frozen.clone()
    nearest = (frozen + product).bfloat16()
    found = folded(frozen, product.clone())
    assert torch.equal(frozen, kept) and found.dtype == torch.bfloat16
    assert arrives(frozen, product, found) == pytest.approx(1, abs=0.03)
    if size < 1e-5:
        assert arrives(frozen, product, nearest) < 0.2, "there would be nothing to mend"
    # What is off is less than the effect, for inputs that the adapter answers to.
    answered = product.T @ torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    off = (found.float() - frozen.float() - product) @ answered
    assert off.norm() < 0.4 * (product @ answered).norm()
    assert torch.equal(found, folded(frozen, product.clone())), "the same adapter gives the same weights"
    if size == 1e-1:  # grown up: as near as bfloat16 comes
        assert (found.float() - nearest.float()).abs().max() <= 2**-8 * nearest.float().abs().max()


def test_without_an_adapters_product_nothing_changes():
    frozen, product = layer(0.0)
    assert torch.equal(folded(frozen, product), frozen)


def test_float32_has_bits_enough():
    frozen, product = layer(1e-6)
    frozen = frozen.float()
    assert torch.equal(folded(frozen, product.clone()), frozen + product)


@pytest.fixture(scope="module")
def engine():
    """In bfloat16, after one small step."""
    engine = make_engine(model_config(tiny_checkpoint(), lora=True), dtype="bfloat16", fold_lora=True)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in engine.parameters.items():
        if "lora_B" in name:
            set_weight(parameter, torch.randn(parameter.shape, generator=generator).sign() * YOUNG)
    return engine


def products(engine) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer: its frozen weight, and what is to be added to it."""
    (part,) = engine.parts.values()
    layers = {name: m for name, m in part.named_modules() if m in FoldedLora([part]).layers}
    return {n: (m.get_base_layer().weight.data.clone(), m.get_delta_weight("default")) for n, m in layers.items()}


def test_the_embedded_engine_draws_with_all_of_a_small_step(engine):
    expected = products(engine)
    assert {frozen.dtype for frozen, _ in expected.values()} == {torch.bfloat16}
    with engine.whole():
        (part,) = engine.parts.values()
        drawn = {n: m.get_base_layer().weight for n, m in part.named_modules() if n in expected}
        shares = [arrives(*expected[name], weight.data) for name, weight in drawn.items()]
    lost = [arrives(frozen, added, (frozen + added).bfloat16()) for frozen, added in expected.values()]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    assert mean(lost) < 0.4 and mean(shares) == pytest.approx(1, abs=0.05)
    after = products(engine)
    assert all(torch.equal(frozen, after[name][0]) for name, (frozen, _) in expected.items())


def test_vllm_omni_draws_with_the_same_weights(engine):
    """Of a folder in float32 too, which training rounds before anything is added."""
    taken: dict[str, torch.Tensor] = {}
    pipeline = SimpleNamespace(
        as_diffusers=lambda model_config: engine.module,
        transformer=engine.module,
        load_weights=lambda weights: [taken.setdefault(name, tensor) is None or name for name, tensor in weights],
    )
    weights, _ = engine.get_per_tensor_param()
    TrainedWeights(pipeline, engine.model_config, torch.bfloat16).load(weights)
    with engine.whole():
        drawn = {
            base_name(f"transformer.{name}"): p.clone()
            for name, p in engine.module.named_parameters()
            if name.endswith("base_layer.weight")
        }
    assert taken.keys() == drawn.keys() and taken
    for name, weight in taken.items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, drawn[name]), name


def rank_main(rank: int, folder: str, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/meet", 2))
    engine = make_engine(model_config(path, lora=True), fold_lora=True)
    data = roll_out_folded(engine)
    update(engine, part(data, slice(rank, None, 2)), loss_function())
    again = roll_out_folded(engine)
    learned = weights(engine)
    if rank == 0:
        torch.save((data, again, learned), f"{folder}/two.pt")
    dist.barrier()
    dist.destroy_process_group()


def roll_out_folded(engine) -> dict[str, torch.Tensor]:
    rollout = make_rollout(engine)
    with engine.whole():
        layers = lora_layers(engine.parts.values())
        assert layers and all(layer.disable_adapters for layer in layers), "what is drawn with has no adapters"
        data = roll_out(engine, rollout=rollout)
    assert not any(layer.disable_adapters for layer in lora_layers(engine.parts.values()))
    return data


def test_two_ranks_fold_what_they_gather(tmp_path, process_group):
    """They draw, learn, and draw again what one rank does, whose frozen weights stay as they are."""
    start_ranks(rank_main, (str(tmp_path), str(tiny_checkpoint())))
    engine = make_engine(model_config(tiny_checkpoint(), lora=True), fold_lora=True)
    start = weights(engine)
    data = roll_out_folded(engine)
    update(engine, data, loss_function())
    again = roll_out_folded(engine)
    two = torch.load(tmp_path / "two.pt", weights_only=True)
    for one, other in ((data, two[0]), (again, two[1])):
        assert_same(one, other)
    assert moved(weights(engine), start) > 1e-4
    assert not torch.equal(again["all_latents"], data["all_latents"]), "with the learned weights"
    assert_same(weights(engine), two[2])
