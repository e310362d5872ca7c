"""What training sends is what vLLM-Omni draws with: all of it, or an error."""

import pytest
import torch
from conftest import NAMES
from test_architectures import PROMPTS, TABLE, config, rollout, training_engine
from vllm_cases import ask, assert_same, seen_and_heard, vllm_rollout

LORA = {"lora_rank": 4, "lora_alpha": 8}


@pytest.fixture(scope="module", params=[(name, kind) for name in NAMES for kind in ("full", "lora")], ids="-".join)
def trained(request):
    """(row, training engine, vLLM-Omni engine) of a model that is trained whole or with LoRA."""
    name, kind = request.param
    row = next(row for row in TABLE if row.name == name)
    model_config = config(row, cfg=False, noise=0.7, **(LORA if kind == "lora" else {}))
    engine = vllm_rollout(model_config)
    yield row, training_engine(model_config), engine
    engine.stop()


@torch.no_grad()
def move(training, seed: int) -> dict[str, torch.Tensor]:
    """Weights as an update may leave them, each one changed; as training sends them."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in training.parameters.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return dict(training.get_per_tensor_param()[0])


def test_every_update_arrives(trained):
    row, training, engine = trained
    before = ask(row, engine, training.model_config, PROMPTS, cfg=False)
    for version in (3, 4):  # the second takes another way: all at once
        engine.update_weights(move(training, version).items(), version)
        mine = ask(row, engine, training.model_config, PROMPTS, cfg=False)
        theirs = ask(row, rollout(training.model_config, training.module), training.model_config, PROMPTS, cfg=False)
        for one, other, old in zip(mine, theirs, before, strict=True):
            assert_same(one, other)
            assert one.version == version
            assert (one.trajectory["final_latents"] - old.trajectory["final_latents"]).abs().max() > 1e-2
        before = mine


def test_frozen_weights_that_are_not_the_folders_go_first(trained):
    """With LoRA. They are drawn with once their adapter has come, and later adapters are added to them."""
    row, training, engine = trained
    if not training.model_config.lora_rank:
        assert training.get_per_tensor_param(base_sync_done=False)[1] is None
        return
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in training.module.named_parameters():
            if name not in training.parameters:
                parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=generator))
    folder, before = engine.weights.folder, engine.version
    first = ask(row, engine, training.model_config, PROMPTS[:1], cfg=False)[0]
    base, peft_config = training.get_per_tensor_param(base_sync_done=False)
    base = dict(base)
    assert not any("lora" in name or "base_layer" in name for name in base)
    engine.update_weights(base.items(), 20, peft_config, base_sync_done=False)
    again = ask(row, engine, training.model_config, PROMPTS[:1], cfg=False)[0]
    same = all(map(torch.equal, seen_and_heard(again.response), seen_and_heard(first.response)))
    assert again.version == before and same, "half of an update is no policy"
    for version in (21, 22):
        engine.update_weights(move(training, version).items(), version, peft_config)
        mine = ask(row, engine, training.model_config, PROMPTS, cfg=False)
        theirs = ask(row, rollout(training.model_config, training.module), training.model_config, PROMPTS, cfg=False)
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
            assert one.version == version
    engine.update_weights(list(base.items())[1:], 23, peft_config, base_sync_done=False)
    with pytest.raises(KeyError, match=f"1 of {len(base)} weights did not arrive"):
        engine.update_weights(move(training, 23).items(), 23, peft_config)
    engine._base, engine.weights.folder = None, folder


def test_an_adapter_of_another_alpha_is_refused(trained):
    _, training, engine = trained
    weights, peft_config = training.get_per_tensor_param()
    if peft_config is not None:
        with pytest.raises(ValueError, match="rank 4 with alpha 16, and the rollout's model has rank 4 with alpha 8"):
            engine.update_weights(weights, 30, peft_config | {"lora_alpha": 16})


def test_a_part_of_an_update_is_an_error(trained):
    row, training, engine = trained
    version, weights = engine.version, move(training, 9)
    fused = next(name for name in weights if "to_v" in name)
    for lost in (fused, next(iter(weights)), list(weights)[-1]):
        rest = {name: tensor for name, tensor in weights.items() if name != lost}
        with pytest.raises(KeyError, match=f"1 of {len(weights)} weights did not arrive, such as .*{lost}"):
            engine.update_weights(rest.items(), 10)
        assert engine.version == version
    with pytest.raises(KeyError, match="weights for .*a_stranger, which is no trained parameter"):
        engine.update_weights([*weights.items(), ("a_stranger", torch.zeros(1))], 10)
    engine.update_weights(weights.items(), 11)
    assert {output.version for output in ask(row, engine, training.model_config, PROMPTS, cfg=False)} == {11}


def test_a_tensor_that_finds_no_place_is_an_error(trained, monkeypatch):
    """Some of vLLM-Omni's models pass over a name that they do not know, and say nothing."""
    _, training, engine = trained
    pipeline, taken = engine.engine.pipeline, type(engine.engine.pipeline).load_weights
    monkeypatch.setattr(engine.weights, "_taken", set())

    def forgetful(weights):
        return taken(pipeline, ((name, tensor) for name, tensor in weights if "to_out" not in name))

    monkeypatch.setattr(pipeline, "load_weights", forgetful)
    with pytest.raises(KeyError, match="of vLLM-Omni has no place for the weights transformer.*to_out.0.weight"):
        engine.update_weights(move(training, 12).items(), 12)


def test_nan_is_never_drawn(trained):
    """Whatever a broken update sends; and with whole weights the engine goes on."""
    row, training, engine = trained
    whole = {name: tensor.clone() for name, tensor in training.get_per_tensor_param()[0]}
    engine.update_weights({name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}.items(), 90)
    with pytest.raises(Exception, match="images have NaN or infinite values: the model has diverged"):
        ask(row, engine, training.model_config, PROMPTS[:1], cfg=False)
    engine.update_weights(whole.items(), 91)
    assert ask(row, engine, training.model_config, PROMPTS[:1], cfg=False)[0].version == 91
