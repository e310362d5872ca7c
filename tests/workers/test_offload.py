"""Weights and optimizer state in CPU memory between stages: the same training, each tensor with one place to go."""

import pytest
import torch
from engine_cases import assert_same, gradients, loss_function, make_engine, model_config, roll_out, update, weights
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine import checkpoint_io, step_in_pieces
from verl_omni.workers.host_memory import HostMemory, Pinned, bring, bring_state

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


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two optimizer steps, the batch that they took, and the weights after two more."""
    folder, engine = tmp_path_factory.mktemp("saved"), make_engine(model_config(tiny_checkpoint()))
    data = roll_out(engine)
    update(engine, data, loss_function())
    engine.save_checkpoint(str(folder))
    update(engine, data, loss_function())
    return folder, data, weights(engine)


@pytest.mark.parametrize("settings", [{"optimizer_offload": True}, OFFLOAD])
def test_an_offloaded_run_resumes_bit_for_bit(settings, saved):
    folder, data, expected = saved
    engine = make_engine(model_config(tiny_checkpoint()), **settings)
    engine.load_checkpoint(str(folder))
    update(engine, data, loss_function())
    assert_same(expected, weights(engine), atol=0)


def test_the_state_of_offloaded_weights_is_on_the_device_after_resuming(saved):
    """It is made where they are: a step on the device would find it in CPU memory."""
    engine = make_engine(model_config(tiny_checkpoint()), param_offload=True)
    engine.device = torch.device("meta")
    engine.load_checkpoint(str(saved[0]))
    states = engine.optimizer.state.values()
    assert states and {state["exp_avg"].device.type for state in states} == {"meta"}


def test_resuming_has_the_state_of_few_parameters_on_the_device(monkeypatch, saved):
    """Before, torch made gradients and state of all of them there at once: a run that offloads has no room for that."""
    engine = make_engine(model_config(tiny_checkpoint()), optimizer_offload=True)
    largest = max(p.nbytes for p in engine.parameters.values())
    monkeypatch.setattr(step_in_pieces, "PIECE", largest)
    gradients_there, taken = [], []
    engine.optimizer.register_step_pre_hook(
        lambda *_: gradients_there.append(sum(p.nbytes for p in engine.parameters.values() if p.grad is not None))
    )
    take = engine.host.take_state
    monkeypatch.setattr(engine.host, "take_state", lambda o, piece, anew: taken.extend(piece) or take(o, piece, anew))
    monkeypatch.setattr(checkpoint_io.dcp, "load", lambda *_, **__: None)
    before, rates = weights(engine), [group["lr"] for group in engine.optimizer.param_groups]
    engine.checkpoint_config.load_contents = ["optimizer"]
    engine.load_checkpoint(str(saved[0]))
    assert max(gradients_there) == largest and len(gradients_there) > 3
    assert list(map(id, taken)) == list(map(id, engine.optimizer.state)) and len(taken) > 50
    assert_same(before, weights(engine), atol=0)
    assert not gradients(engine) and [group["lr"] for group in engine.optimizer.param_groups] == rates


def test_a_checkpoint_that_does_not_fit_leaves_the_offloaded_state_as_it_was(monkeypatch, saved):
    folder, data, _ = saved
    engine = make_engine(model_config(tiny_checkpoint()), **OFFLOAD)
    update(engine, data, loss_function(clip=10.0), steps=1)

    def moments():
        states = {name: engine.optimizer.state.get(p, {}) for name, p in engine.parameters.items()}
        return {f"{name}.{key}": value.clone() for name, state in states.items() for key, value in state.items()}

    before = moments()

    def unfit(tensors, held, kind, where):
        if kind == "optimizer.":
            raise ValueError("does not fit")

    monkeypatch.setattr(checkpoint_io, "_check_fit", unfit)
    with pytest.raises(ValueError, match="does not fit"):
        engine.load_checkpoint(str(folder))
    assert_same(before, moments(), atol=0)


@pytest.mark.parametrize("arguments", [{"fused": True}, {"capturable": True}, {}])
def test_steps_are_counted_where_the_optimizer_reads_them(arguments):
    """A fused AdamW on a GPU takes no count that lies in CPU memory, where a resumed run has had it made."""
    weight = torch.nn.Parameter(torch.ones(2, 3))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight])
    optimizer.step()
    optimizer.param_groups[0] |= arguments
    bring_state(optimizer, [weight], torch.device("meta"))
    state = optimizer.state[weight]
    assert state["exp_avg"].device.type == state["exp_avg_sq"].device.type == "meta"
    assert state["step"].device.type == ("meta" if arguments else "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="state goes to and fro between a GPU and its host (-m gpu)")
@pytest.mark.parametrize("settings", [{}, {"optimizer_offload": True}, {"param_offload": True}, OFFLOAD])
def test_a_resumed_run_goes_on_on_a_gpu(settings, tmp_path):
    def step(engine):
        with engine.train_mode():
            for i, parameter in enumerate(engine.parameters.values()):
                parameter.grad = torch.full_like(parameter, 0.01 * (1 + i % 7))
            engine.optimizer_step()
        return weights(engine)

    config = model_config(tiny_checkpoint())
    first, again = make_engine(config, **settings), make_engine(config, **settings)
    step(first)
    first.save_checkpoint(str(tmp_path))
    again.load_checkpoint(str(tmp_path))
    for state in again.optimizer.state.values():
        assert state["exp_avg"].is_cuda != ("optimizer_offload" in settings)
        assert state["exp_avg"].is_cuda or state["exp_avg"].is_pinned()
    assert_same(step(first), step(again), atol=0)


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
