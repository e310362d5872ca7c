"""Weights and optimizer state in CPU memory between stages: the same training, each tensor with one place to go."""

import pytest
import torch
from engine_cases import assert_same, gradients, loss_function, make_engine, model_config, roll_out, update, weights
from tiny_models import tiny_checkpoint

from verl_omni.workers.host_memory import HostMemory, bring

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
