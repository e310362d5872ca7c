"""What a checkpoint gives back to an engine, and what it never does: run code."""

import contextlib
import errno
import io
import json
import os
import pickle
import shutil
import stat

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine_cases import assert_same, loss_function, make_engine, model_config, roll_out, update, weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine import checkpoint_io
from verl_omni.workers.engine import export as export_module
from verl_omni.workers.engine.export import LORA_FILE, export, order_metadata


def engine_with(lora: bool = True, **optim):
    return make_engine(model_config(tiny_checkpoint(), lora=lora), optim)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two optimizer steps, and the batch that they took."""
    folder = tmp_path_factory.mktemp("saved")
    engine = engine_with(lr=0.01, lr_warmup_steps=4)
    data = roll_out(engine)
    update(engine, data, loss_function())
    engine.save_checkpoint(str(folder))
    return folder, data, engine


def copy(saved, target):
    return shutil.copytree(saved[0], target / "checkpoint")


# ---- the optimizer -----------------------------------------------------------------------------------


def moments(engine) -> dict[str, torch.Tensor]:
    states = {name: engine.optimizer.state.get(p, {}) for name, p in engine.parameters.items()}
    return {f"{name}.{key}": value.clone() for name, state in states.items() for key, value in state.items()}


def test_the_optimizer_goes_on_with_its_moments(saved):
    folder, data, engine = saved
    again = engine_with(lr=0.01, lr_warmup_steps=4)
    again.load_checkpoint(str(folder))
    assert moments(again).keys() == moments(engine).keys() and moments(again)
    assert_same(moments(engine), moments(again), atol=0)


def test_a_parameter_without_a_gradient_has_no_moments_after_either(tmp_path):
    engine = engine_with(lora=False)
    update(engine, roll_out(engine), loss_function(), steps=1)
    without = {name for name, p in engine.parameters.items() if p not in engine.optimizer.state}
    assert without, "the last block's text output"
    engine.save_checkpoint(str(tmp_path))
    again = engine_with(lora=False)
    again.load_checkpoint(str(tmp_path))
    assert {name for name, p in again.parameters.items() if p not in again.optimizer.state} == without


def test_moments_that_are_missing_are_an_error(saved, tmp_path):
    """Before, the optimizer of these parameters started fresh without a word."""
    folder = copy(saved, tmp_path)
    (shard,) = (folder / "state").glob("*.safetensors")
    held = load_file(shard)
    lost = next(name for name in held if name.endswith("exp_avg"))
    save_file({name: tensor for name, tensor in held.items() if name != lost}, shard)
    with pytest.raises(ValueError, match="does not fit this run: for optimizer.*exp_avg .* it holds nothing"):
        engine_with().load_checkpoint(str(folder))

    notes = json.loads((folder / "state/engine.json").read_text())
    notes["moments"][next(iter(notes["moments"]))] = ["step"]
    (folder / "state/engine.json").write_text(json.dumps(notes))
    with pytest.raises(ValueError, match=r"holds the optimizer's \['step'\], and AdamW needs \['exp_avg',"):
        engine_with().load_checkpoint(str(folder))


@pytest.mark.parametrize("kind", ["optimizer.{}.exp_avg_max", "model.{}"])
def test_what_a_run_has_no_place_for_is_an_error_and_nothing_is_touched(kind, saved, tmp_path):
    """Before, tensors that nothing asked for were lost without a word, and the optimizer's state with them."""
    folder = copy(saved, tmp_path)
    (shard,) = (folder / "state").glob("*.safetensors")
    save_file(load_file(shard) | {kind.format("somebody.else"): torch.zeros(3)}, shard)
    engine = engine_with()
    update(engine, saved[1], loss_function(clip=10.0), steps=1)
    before = weights(engine), moments(engine)
    with pytest.raises(ValueError, match=r"does not fit this run, which has no place for its \w+.somebody.else"):
        engine.load_checkpoint(str(folder))
    assert_same(before[0], weights(engine), atol=0)
    assert_same(before[1], moments(engine), atol=0)


def test_another_optimizer_is_an_error_unless_it_is_to_start_fresh(saved):
    engine = engine_with(optimizer="NAdam")
    with pytest.raises(ValueError, match="holds the state of AdamW, and this run's optimizer is NAdam"):
        engine.load_checkpoint(str(saved[0]))
    engine.checkpoint_config.load_contents = ["model", "extra"]
    engine.load_checkpoint(str(saved[0]))
    assert not moments(engine)
    assert_same(weights(saved[2]), weights(engine), atol=0)


def test_a_new_learning_rate_applies_from_the_step_that_was_reached(saved):
    """The third of four steps of warm-up to the new rate, not to the old one."""
    folder, data, _ = saved
    engine = engine_with(lr=0.1, lr_warmup_steps=4, betas=[0.5, 0.6])
    engine.load_checkpoint(str(folder))
    (group,) = engine.optimizer.param_groups
    assert group["lr"] == pytest.approx(0.1 * 3 / 4) and tuple(group["betas"]) == (0.5, 0.6)
    rates = [m["lr"] for m in update(engine, data, loss_function(clip=10.0))]
    assert rates == pytest.approx([0.1 * 3 / 4, 0.1])


@pytest.mark.parametrize("optimizer", ["SGD", "Adafactor", "RAdam", "Adagrad", "RMSprop", "ASGD"])
def test_every_kind_of_state_goes_on_bit_for_bit(optimizer, tmp_path):
    engine = engine_with(optimizer=optimizer, weight_decay=0.0)
    data = roll_out(engine)
    update(engine, data, loss_function())
    engine.save_checkpoint(str(tmp_path))
    again = engine_with(optimizer=optimizer, weight_decay=0.0)
    again.load_checkpoint(str(tmp_path))
    for one in (engine, again):
        update(one, data, loss_function(clip=10.0))
    assert_same(weights(engine), weights(again), atol=0)


# ---- a checkpoint from a stranger --------------------------------------------------------------------


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, proof):
        self.proof = str(proof)

    def __reduce__(self):
        return os.mkdir, (self.proof,)


def test_the_payload_of_these_tests_does_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def pickles(proof) -> list[bytes]:
    """As pickle writes it, and as torch does."""
    zipped = io.BytesIO()
    torch.save(Payload(proof), zipped)
    return [pickle.dumps(Payload(proof)), zipped.getvalue()]


def test_nothing_that_came_with_a_checkpoint_runs(saved, tmp_path):
    """A pickle in the place of every file, and under every name that this or torch's own format reads."""
    read = [str(p.relative_to(saved[0])) for p in (saved[0] / "state").rglob("*")]
    folder, engine = copy(saved, tmp_path), engine_with()
    for name in (*read, "state/.metadata", "state/__0_0.distcp", "trainer.pt"):
        for content in pickles(tmp_path / "ran"):
            path = folder / name
            before = path.read_bytes() if path.exists() else None
            path.write_bytes(content)
            with pytest.raises(Exception) if name in read else contextlib.nullcontext():  # noqa: B017
                engine.load_checkpoint(str(folder))
            path.unlink() if before is None else path.write_bytes(before)
    assert len(read) == 2 and not (tmp_path / "ran").exists()


def test_a_checkpoint_holds_no_pickle(saved):
    assert {p.suffix for p in saved[0].rglob("*") if p.is_file()} == {".json", ".safetensors"}


@pytest.mark.parametrize("name", ["pytorch_lora_weights.bin", "pytorch_lora_weights.safetensors"])
def test_lora_weights_from_a_stranger_run_nothing(name, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusers.loaders.lora_base.HF_HUB_OFFLINE", False)
    for content in pickles(tmp_path / "ran"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Exception):  # noqa: B017  (huggingface's own)
            make_engine(model_config(tiny_checkpoint(), lora=True, lora_path=str(tmp_path)))
    assert not (tmp_path / "ran").exists()


def test_a_model_folder_from_a_stranger_runs_nothing(tmp_path):
    shutil.copytree(tiny_checkpoint(), tmp_path / "model")
    weights_file = tmp_path / "model/transformer/diffusion_pytorch_model.safetensors"
    weights_file.unlink()
    torch.save({"x": Payload(tmp_path / "ran")}, weights_file.with_suffix(".bin"))
    with pytest.raises(Exception):  # noqa: B017  (diffusers' own)
        make_engine(model_config(tmp_path / "model"))
    assert not (tmp_path / "ran").exists()


# ---- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_what_is_exported_has_the_mode_that_the_user_gives_files(lora, tmp_path):
    before = os.umask(0o027)
    try:
        engine_with(lora=lora).save_checkpoint(str(tmp_path / "checkpoint"))
    finally:
        os.umask(before)
    files = [p for p in (tmp_path / "checkpoint").rglob("*") if p.is_file()]
    assert any("export" in p.parts for p in files)
    assert {oct(stat.S_IMODE(p.stat().st_mode)) for p in files} == {oct(0o640)}


def test_the_size_of_a_checkpoint_is_known_before(saved):
    folder, _, engine = saved
    written = sum(p.stat().st_size for p in folder.rglob("*.safetensors"))
    assert checkpoint_io.needed_bytes(engine) <= written < 1.5 * checkpoint_io.needed_bytes(engine) + 2**16


def test_a_disk_that_fills_up_is_an_ordinary_error(saved, tmp_path, monkeypatch):
    """torch would raise a BaseException of all ranks' tracebacks."""

    def full(self, plan, planner):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.HuggingFaceStorageWriter, "write_data", full)
    with pytest.raises(OSError, match="No space left"):
        saved[2].save_checkpoint(str(tmp_path))


def test_the_same_weights_are_the_same_file(saved, tmp_path):
    """safetensors writes metadata in an order of chance, and a set has another one in every process."""
    files = []
    for i in range(8):
        export(saved[2], str(tmp_path / str(i)))
        files.append((tmp_path / str(i) / LORA_FILE).read_bytes())
    assert len(set(files)) == 1
    assert_same(load_file(tmp_path / "0" / LORA_FILE), load_file(saved[0] / "export" / LORA_FILE), atol=0)
    with safe_open(tmp_path / "0" / LORA_FILE, "pt") as file:
        told = json.loads(file.metadata()["lora_adapter_metadata"])
    modules = told["transformer.target_modules"]
    assert len(modules) > 1 and modules == sorted(modules)


def test_any_order_of_the_metadata_becomes_one(tmp_path):
    said = {f"key {i}": f'{i} "quoted" \u00e9 \n' for i in range(9)}
    for i in range(8):
        save_file({"x": torch.arange(3.0)}, tmp_path / str(i), metadata=said)
    assert len({(tmp_path / str(i)).read_bytes() for i in range(8)}) > 1
    for i in range(8):
        order_metadata(str(tmp_path / str(i)))
    assert len({(tmp_path / str(i)).read_bytes() for i in range(8)}) == 1
    with safe_open(tmp_path / "0", "pt") as file:
        assert file.metadata() == said and file.get_tensor("x").tolist() == [0.0, 1.0, 2.0]


def test_a_rank_that_cannot_write_its_export_gathers_on_for_the_others(tmp_path, monkeypatch):
    engine, gathered = engine_with(lora=False), []
    monkeypatch.setattr(export_module, "FILE_BYTES", 20_000)
    monkeypatch.setattr(export_module, "gathered", lambda tensor: gathered.append(tensor) or tensor)

    def full(tensors, path):
        raise OSError(errno.ENOSPC, f"No space left on device: {len(gathered)}")

    monkeypatch.setattr(export_module, "_write_file", full)
    with pytest.raises(OSError) as told:
        export(engine, str(tmp_path / "export"))
    assert len(gathered) == len(engine.parameters)
    assert 0 < int(told.value.strerror.split(": ")[1]) < len(gathered), "the first error"
