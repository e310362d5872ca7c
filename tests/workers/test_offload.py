"""Weights and optimizer state in CPU memory between stages: the same training, each tensor with one place to go."""

import pytest
import torch
from engine_cases import assert_same, gradients, loss_function, make_engine, model_config, roll_out, update, weights
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine import step_in_pieces
from verl_omni.workers.host_memory import HostMemory, Pinned, bring

OFFLOAD = {"param_offload": True, "optimizer_offload": True}


def test_the_same_training():
    config = model_config(tiny_checkpoint(), lora=True)
    data = roll_out(make_engine(config))
    plain, offloaded = make_engine(config), make_engine(config, **OFFLOAD)
    for engine in (plain, offloaded):
        update(engine, data, loss_function())
        update(engine, data, loss_function())
    assert_same(weights(plain), weights(offloaded))
    assert gradients(plain) and not gradients(offloaded)  # those would go to and fro with the weights for nothing


def test_the_state_of_few_parameters_at_a_time_is_on_the_device(monkeypatch):
    config = model_config(tiny_checkpoint())
    data = roll_out(make_engine(config))
    plain, offloaded = make_engine(config), make_engine(config, optimizer_offload=True)
    largest = max(p.nbytes for p in offloaded.parameters.values())
    monkeypatch.setattr(step_in_pieces, "PIECE", largest)
    there, bring_state = [], step_in_pieces.bring_state

    def brought(optimizer, parameters, device):
        there.append(list(parameters))
        bring_state(optimizer, parameters, device)

    monkeypatch.setattr(step_in_pieces, "bring_state", brought)
    for engine in (plain, offloaded):
        update(engine, data, loss_function(), steps=2)
    assert_same(weights(plain), weights(offloaded), atol=0)
    trained = len(plain.optimizer.state)  # not those of what no row goes through
    assert max(sum(p.nbytes for p in piece) for piece in there) == largest
    assert len(there) > 6 and sum(map(len, there)) == 2 * trained
    (group,) = offloaded.optimizer.param_groups
    assert list(map(id, group["params"])) == list(map(id, offloaded.parameters.values()))
    assert len(offloaded.optimizer.state) == trained > 50


def test_places_lie_side_by_side_in_pinned_blocks():
    pinned = Pinned(pin=False)
    pinned.BLOCK = 4096
    tensors = [torch.randn(3, 5), torch.randn(7, 9).t(), torch.randn(2000), torch.randn(40, dtype=torch.bfloat16)]
    places = [pinned.like(tensor).copy_(tensor) for tensor in tensors]
    assert [place.stride() for place in places] == [tensor.stride() for tensor in tensors]
    for place, tensor in zip(places, tensors, strict=True):
        assert torch.equal(place, tensor)  # nobody has written into another's
    blocks = [place.untyped_storage() for place in places]
    assert blocks[0].data_ptr() == blocks[1].data_ptr() and [b.nbytes() for b in blocks] == [4096, 4096, 8192, 4096]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a GPU (pytest -m gpu)")
def test_a_reference_is_pinned_wherever_the_weights_are():
    engine = make_engine(model_config(tiny_checkpoint()), **OFFLOAD)
    engine.keep_reference()
    copies = engine.policies.state_dict()["reference"].values()
    assert copies and all(copy.is_pinned() for copy in copies)


def test_each_tensor_keeps_its_place():
    """Trained weights are copied there each time they leave, frozen ones the first time only."""
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    module[0].weight.requires_grad_(False)
    host, seen = HostMemory(), []
    on_device = {name: p.data for name, p in module.named_parameters()}
    for value in (1.0, 2.0):
        for name, parameter in module.named_parameters():
            parameter.data = on_device[name].fill_(value)  # as if it had come back
        host.take([module])
        assert all(p.data_ptr() != on_device[name].data_ptr() for name, p in module.named_parameters())
        seen.append({name: (p.data_ptr(), p.flatten()[0].item()) for name, p in module.named_parameters()})
    first, second = seen
    assert {name: place for name, (place, _) in first.items()} == {name: place for name, (place, _) in second.items()}
    assert {name for name, (_, value) in second.items() if value == 1.0} == {"0.weight"}
    assert all(value == 1.0 for _, value in first.values())
    bring([module], torch.device("cpu"))
    assert module(torch.ones(4, 2)).shape == (4, 3)
