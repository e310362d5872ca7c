"""A plan counts what real engines hold: parameters, gradients, optimizer state, and what autograd keeps."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from composed import composed
from diffusers import ModelMixin
from omegaconf import OmegaConf
from test_architectures import TABLE, picture
from tiny_models import tiny_checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from verl_omni.cli import plan
from verl_omni.config import (
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionModelConfig,
    EngineConfig,
    FSDPConfig,
    OptimizerConfig,
)
from verl_omni.perf.rates import rates
from verl_omni.trainer.checks.precision import check_own_gpu
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.forecast.amounts import amounts
from verl_omni.trainer.forecast.forecast import forecast
from verl_omni.trainer.forecast.knobs import changes
from verl_omni.trainer.forecast.model import EmptyModel, ModelCosts
from verl_omni.trainer.forecast.passes import Lines, Pass, Passes
from verl_omni.trainer.forecast.remembered import KEPT, Remembered, key_of, own_code
from verl_omni.trainer.forecast.stages import RankMemory, ServerMemory, not_counted, optimizer_ratio
from verl_omni.trainer.forecast.tables import text
from verl_omni.trainer.forecast.ways import varied
from verl_omni.trainer.forecast.weights import weights_of
from verl_omni.utils import json_files
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine
from verl_omni.workers.engine.lora import add_lora, lora_layers
from verl_omni.workers.engine.module import build_module
from verl_omni.workers.host_memory import local
from verl_omni.workers.layout import Layout
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
OFTEN = [("StableDiffusion3Pipeline", 0), ("CogView4Pipeline", 4), ("Lumina2Pipeline", 0)]
SELDOM = [
    ("StableDiffusion3Pipeline", 4), ("QwenImagePipeline", 4), ("WanPipeline", 0), ("WanPipeline", 4),
    ("CogView4Pipeline", 0), ("Lumina2Pipeline", 4), ("GlmImagePipeline", 4), ("HunyuanVideo15Pipeline", 4),
    ("AceStepPipeline", 0),
]  # fmt: skip
ARCHITECTURES = OFTEN + [pytest.param(*one, marks=pytest.mark.slow) for one in SELDOM]


@pytest.fixture
def fake_ranks():
    """This process is rank 0 of so many, which do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def join(ranks: int) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    shared = dist.is_initialized()  # the group of one process, which serves tests before and after this one
    if shared:
        dist.destroy_process_group()
    yield join
    dist.destroy_process_group()
    if shared:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


@pytest.mark.parametrize("lora", [0, 4])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_rank_holds_what_the_plan_says(fake_ranks, ranks, lora):
    fake_ranks(ranks)
    config = DiffusionModelConfig(path=str(tiny_checkpoint()), lora_rank=lora)
    engine = DiffusersFSDPEngine(config, FSDPConfig(), OptimizerConfig(), CheckpointConfig())
    engine.initialize()
    said = weights_of(build_module(config, 0, engine.model_dtype, None)[1].values())
    assert said.bytes(ranks) == sum(local(p).nbytes for p in engine.module.parameters())
    for parameter in engine.parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    assert said.trained_bytes(ranks) == sum(local(p.grad).nbytes for p in engine.parameters.values())
    engine.optimizer.step()
    state = [local(v) for s in engine.optimizer.state.values() for v in s.values() if v.ndim]
    assert said.trained_bytes(ranks) * optimizer_ratio(OptimizerConfig()) == sum(v.nbytes for v in state)
    with engine.whole():
        assert all(p.grad is None for p in engine.module.parameters())  # a rollout has their memory


@pytest.mark.parametrize("modules", [None, ["to_q", "to_k"]])
@pytest.mark.parametrize("lora", [0, 4])
def test_copies_in_8_bits_are_what_the_plan_says(process_group, lora, modules):
    """Of layers that LoRA adapts only those without a copy in 8 bits are folded."""
    config = DiffusionModelConfig(path=str(tiny_checkpoint("QwenImagePipeline")), lora_rank=lora)
    common = EngineConfig(fp8_modules=modules, fold_lora=True if lora else None, dtype="bfloat16")
    engine = DiffusersFSDPEngine(config, FSDPConfig(), OptimizerConfig(), CheckpointConfig(), common=common)
    engine.initialize()
    adapted = [layer.get_base_layer() for layer in lora_layers(engine.parts.values())]
    frozen = [layer.weight.data_ptr() for layer in adapted]
    with engine.whole("fp8"):
        copies = sum(layer.fp8_weight.nbytes + layer.fp8_scale.nbytes for layer in engine.fp8.linears)
        changed = [layer for layer, before in zip(adapted, frozen, strict=True) if layer.weight.data_ptr() != before]
    model = EmptyModel(config, engine.adapter, 0, (engine.dtype, engine.model_dtype), (80, 80))
    said = model.eight_bits(modules or engine.adapter.fp8_modules)
    assert said == (copies, sum(layer.weight.nbytes for layer in changed)) and copies > 0
    assert bool(changed) == bool(lora and modules)


def test_the_optimizer_is_asked_for_its_state():
    kinds = {"AdamW": 2, "SGD": 0, "Adagrad": 1}
    assert {name: optimizer_ratio(OptimizerConfig(optimizer=name)) for name in kinds} == kinds


def overrides_of(folder, model, *more: str, images: tuple[str, ...] = ()) -> list[str]:
    prompts = folder / "prompts.jsonl"
    row = {"prompt": "a cat", "data_source": "jpeg_compressibility", "reward_model": {"ground_truth": ""}}
    row |= {"images": images} if images else {}
    prompts.write_text(json.dumps(row) + "\n")
    sides = () if "Audio" in str(model) or "AceStep" in str(model) else ("height", "width")
    size = [f"actor_rollout_ref.rollout.pipeline.{side}=32" for side in sides]
    batch = ["data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4"]
    return [f"{MODEL}.path={model}", f"data.train_files={prompts}", *size, *batch, *more]


def costs_of(folder, architecture: str, *more: str) -> ModelCosts:
    frames = ["actor_rollout_ref.rollout.pipeline.num_frames=5"] if architecture == "WanPipeline" else []
    tokens = 400 if architecture == "HunyuanVideo15Pipeline" else 200  # of its own 364 are not the prompt's
    config = composed(*overrides_of(folder, tiny_checkpoint(architecture), *frames, *more))
    return ModelCosts(OmegaConf.to_object(prepare_config(config)), (tokens, tokens))


FP8 = "actor_rollout_ref.rollout.precision=fp8"


def test_copies_in_8_bits_are_counted_while_they_are_held(tmp_path, monkeypatch):
    arr, some = "actor_rollout_ref", ["to_q", "to_k"]
    drawn, fp8 = f"{arr}.rollout.precision", {f"{arr}.rollout.precision": "fp8"}
    fp8_reference = {**fp8, f"{ACTOR}.use_kl_loss": True, f"{arr}.ref.precision": "fp8"}
    costs = costs_of(tmp_path, "QwenImagePipeline", f"{MODEL}.lora_rank=4", FP8)
    copies, others = costs.eight_bits(some)
    adapted = costs.weights.adapted
    assert 0 < others < adapted and copies > 0
    costs.passes.forward(2)  # takes most blocks out of the module
    assert costs.model.eight_bits(some) == (copies, others)
    given = overrides_of(tmp_path, tiny_checkpoint("QwenImagePipeline"), f"{MODEL}.lora_rank=4", FP8)
    settings = OmegaConf.to_object(prepare_config(composed(*given)))
    engine = {f"{ACTOR}.engine.fp8_modules": some, f"{ACTOR}.engine.fold_lora": True}

    def held(changes: dict, layout: Layout = Layout(), servers: int = 0) -> dict[str, tuple[float, ...]]:  # noqa: B008
        own = varied(settings, {drawn: None, **engine, **changes})
        if servers:
            rank = ServerMemory(costs, own, amounts(own), servers)
        else:
            rank = RankMemory(costs, own, amounts(own), layout, 80e9)
        names = ("8-bit copies", "LoRA folded into a copy", "whole model, gathered")
        return {stage.name: tuple(stage.device.get(name, 0) for name in names) for stage in rank.stages()}

    found = held(fp8)
    assert found["rollout"] == found["decode"] == (copies, others, 0) and found["update"] == (0, 0, 0)
    assert held({})["rollout"] == (0, adapted, 0)
    # The pool comes before what is chosen, and validation draws in full: the more of the two is counted.
    pool, validated = {f"{arr}.rollout.pool.precision": "fp8"}, {"data.val_files": "prompts.jsonl"}
    unfolded = {f"{ACTOR}.engine.fold_lora": False}
    assert adapted > copies + others
    assert held(pool)["rollout"] == held({**fp8, **validated})["rollout"] == (0, adapted, 0)
    assert held({**pool, **unfolded})["rollout"] == held({**fp8, **validated, **unfolded})["rollout"] == (copies, 0, 0)
    assert held({f"{ACTOR}.use_kl_loss": True})["reference"] == (0, 0, 0)
    assert held(fp8_reference)["reference"] == (copies, 0, 0)
    whole = costs.weights.gathered(costs.dtype.itemsize)
    assert held(fp8_reference, Layout(shard=2))["reference"] == (copies, 0, whole)
    assert set(held(fp8, servers=1).values()) == {(copies, 0, 0)} and set(held({}, servers=1).values()) == {(0, 0, 0)}
    monkeypatch.setattr(DiffusersRollout, "has_a_copy", True)  # as vLLM-Omni has one of its own beside training
    assert held({f"{ACTOR}.engine.fold_lora": None})["rollout"] == (0, 0, 0)


def test_a_pool_is_drawn_with_more_rows_than_are_trained(tmp_path):
    """Two prompts with four images each, chosen from 32."""
    costs = costs_of(tmp_path, "QwenImagePipeline")
    given = overrides_of(tmp_path, tiny_checkpoint("QwenImagePipeline"), "actor_rollout_ref.rollout.max_num_seqs=48")
    settings = OmegaConf.to_object(prepare_config(composed(*given)))
    pool = varied(settings, {"actor_rollout_ref.rollout.pool.size": 32})

    def rows(own, ranks: int) -> int:
        rank = RankMemory(costs, own, amounts(own), Layout(replicate=ranks), 80e9)
        return rank.rows_drawn // (2 if amounts(own).guided else 1)

    assert [rows(settings, ranks) for ranks in (1, 2)] == [2 * 4, 4]
    assert [rows(pool, ranks) for ranks in (1, 2)] == [48, 32]
    assert amounts(pool).images == 8


def test_a_plan_asks_no_gpu_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA A100")
    given = overrides_of(tmp_path, tiny_checkpoint("QwenImagePipeline"), FP8)
    settings = OmegaConf.to_object(prepare_config(composed(*given)))
    with pytest.raises(ValueError, match=r"8\.9 or newer .* NVIDIA A100 has 8\.0"):
        check_own_gpu(settings)
    check_own_gpu(varied(settings, {"actor_rollout_ref.rollout.precision": None}))


def test_8_bits_are_refused_as_the_engine_does(tmp_path):
    given = overrides_of(tmp_path, tiny_checkpoint("QwenImagePipeline"), FP8)
    with pytest.raises(ValueError, match="--gpu=a100 cannot compute in 8 bits: leave .*rollout.precision out"):
        forecast(composed(*given), gpu="a100")
    with pytest.raises(ValueError, match="no linear layer of the transformer's blocks is called nonesuch"):
        forecast(composed(*given, f"{ACTOR}.engine.fp8_modules=[nonesuch]"))


AROUND = {
    "LTX2Pipeline": 9, "LTX2ImageToVideoPipeline": 9, "HunyuanVideo15Pipeline": 5, "WanImageToVideoPipeline": 5,
    "FluxKontextPipeline": None, "ChromaPipeline": None, "LongCatAudioDiTPipeline": None, "GlmImagePipeline": None,
    "CogView4Pipeline": None, "AceStepPipeline": None, "Lumina2Pipeline": None, "MiniMaxH3ModularPipeline": 22,
}  # fmt: skip


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name in ("LTX2Pipeline", "GlmImagePipeline") else pytest.mark.slow)
        for name in AROUND
    ],
)
def test_what_is_around_the_transformer_is_counted(architecture, tmp_path):
    """As diffusers loads it: what decodes, sound too, and what makes features of a prompt."""
    frames = AROUND[architecture]
    more = [f"actor_rollout_ref.rollout.pipeline.num_frames={frames}"] if frames else []
    costs = costs_of(tmp_path, architecture, *more)
    pipe = next(row for row in TABLE if row.name == architecture).load()
    modules = {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
    decoders = modules.keys() & {"vae", "audio_vae", "vocoder"}

    def width(module: torch.nn.Module, parameter: str) -> int:
        """transformers means float16 alone by the same name."""
        wide = set(module._keep_in_fp32_modules or ()) if isinstance(module, ModelMixin) else set()
        return costs.dtype.itemsize if wide.isdisjoint(parameter.split(".")) else 4

    def held(names) -> int:
        return sum(p.numel() * width(modules[n], key) for n in names for key, p in modules[n].named_parameters())

    assert costs.vae_bytes == held(decoders)
    assert costs.encoder_bytes == held(modules.keys() - decoders - {"transformer", "transformer_2"})
    assert costs.decode(2).extra > 0 and costs.model.inputs(2)


def plain_attention(query, key, value, attn_mask=None, **settings):
    return (query @ key.mT).softmax(-1) @ value


def kept_by_autograd(run, there) -> int:
    """Bytes that the graph of a real forward holds at its end, beside what was there before.

    Not those of what nobody goes on with, such as the text that the last block returns.
    """
    known = {t.untyped_storage()._cdata for t in there if isinstance(t, torch.Tensor)}
    saved: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def pack(tensor):
        if tensor.untyped_storage()._cdata not in known:
            saved[tensor.untyped_storage()] = None
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run()
    saved[output.untyped_storage()] = None
    return sum(storage.nbytes() for storage in saved)


@pytest.mark.parametrize(("architecture", "lora"), ARCHITECTURES)
def test_activations_are_those_that_autograd_keeps(architecture, lora, monkeypatch, tmp_path):
    """From one block and two, two rows and three, to all blocks and five rows: real ones on the CPU, in float32."""
    monkeypatch.setattr("verl_omni.perf.live_bytes._attention", plain_attention)
    monkeypatch.setattr("verl_omni.perf.live_bytes.GRAIN", 1)  # autograd tells how large a tensor is
    costs = costs_of(tmp_path, architecture, f"{MODEL}.lora_rank={lora}", f"{ACTOR}.engine.dtype=float32")
    said = costs.passes.training(5, checkpointing=False, compiled=False)
    module = costs.adapter.load_module(costs.config, torch.float32).train()
    if lora:
        add_lora({"transformer": module}, costs.config, costs.adapter)
    inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in costs.model.inputs(5).items()}
    tables = [table for layer in module.modules() for table in vars(layer).values()]
    there = [*module.parameters(), *module.buffers(), *inputs.values(), *tables]
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", plain_attention)
    real = kept_by_autograd(lambda: costs.adapter.forward(module, inputs), there)
    assert said.kept == real
    kept = costs.passes.training(5, checkpointing=True, compiled=False)
    assert kept.kept < 0.5 * said.kept
    assert 0.5 * said.forward < kept.backward - said.backward <= said.forward  # blocks once more, but for their ends


def test_what_was_measured_is_kept_for_the_next_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = composed(*overrides_of(tmp_path, tiny_checkpoint("StableDiffusion3Pipeline")))
    settings, measured = OmegaConf.to_object(prepare_config(config)), []
    monkeypatch.setattr(Passes, "whole", lambda self, rows, **how: measured.append(rows) or Pass(rows, 0.5, 3.0))
    monkeypatch.setattr(Passes, "make_tables", lambda self, rows: None)
    monkeypatch.setattr("verl_omni.trainer.forecast.passes.in_forks", lambda work: [one() for one in work])
    monkeypatch.setattr(EmptyModel, "decode", lambda self, rows, tiling: Pass(0, rows / (1 + tiling), 1))

    def planned(tokens: int, remember: bool = True) -> list:
        costs = ModelCosts(settings, (tokens, tokens), remember)
        around = [costs.weights, costs.vae_bytes, costs.encoder_bytes, costs.latent_bytes, costs.condition_bytes]
        return [costs.passes.forward(4), costs.decode(2), costs.decode(2, tiling=True), *around]

    first = planned(200)
    assert first[0].kept == 4 and len(measured) == 2
    with monkeypatch.context() as without:
        without.setattr("verl_omni.trainer.forecast.model.build_module", None)  # nothing is built
        assert planned(200) == first and len(measured) == 2
    planned(230)  # of longer prompts nobody knows
    assert len(measured) == 4
    for file in tmp_path.glob("verl_omni/plan/*.json"):
        file.write_text("{")  # half of one
    assert planned(200) == first and len(measured) == 6
    planned(200, remember=False)  # unless it is asked to, it remembers nothing
    assert len(measured) == 8


@pytest.mark.parametrize("linked", [False, True])
def test_another_config_is_another_model(tmp_path, linked):
    """Whatever its folder is called: figures of one are not taken for those of the other."""
    folder = shutil.copytree(tiny_checkpoint("StableDiffusion3Pipeline"), tmp_path / "model")
    if linked:  # as where models have parts in common
        (folder / "transformer").rename(tmp_path / "elsewhere")
        (folder / "transformer").symlink_to(tmp_path / "elsewhere")

    def key() -> str:
        settings = OmegaConf.to_object(prepare_config(composed(*overrides_of(tmp_path, folder))))
        return ModelCosts(settings, (200, 200), remember=True).known.file.name

    before, file = key(), folder / "transformer" / "config.json"
    assert key() == before
    file.write_text(file.read_text().replace('"num_layers": ', '"num_layers": 1'))
    assert key() != before


def test_the_adapters_of_one_file_are_two_and_all_our_code_counts():
    class Other(EmptyModel): ...

    assert key_of([], (EmptyModel,)) != key_of([], (Other,)) != key_of([], (type("Other", (EmptyModel,), {}),))
    assert Path(json_files.__file__).read_text() in own_code()


def test_only_what_was_measured_last_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for number in range(KEPT + 3):
        known = Remembered(f"{number:03}")
        known.add({"a": number})
        os.utime(known.file, (number, number))
    Remembered("000").add({"a": 0})
    names = sorted(file.stem for file in known.file.parent.iterdir())
    assert names == ["000", *(f"{number:03}" for number in range(4, KEPT + 3))]


def test_within_a_budget_activations_are_those_of_just_as_many_rows():
    """What it spares, and what is computed again, beside the block as it is written; and nothing is a sum of rows."""
    asked = []

    def whole(rows: int, gradient: bool, compiled: bool = False, budget: float | None = None) -> Pass:
        asked.append((rows, budget))
        if not compiled:
            return Pass(kept=100 * rows, extra=10, forward=5 * rows, backward=6 * rows, block=9 * rows)
        return Pass(60 * rows * budget, 0, 5 * rows, (8 - budget) * rows, 6 * rows * budget)

    passes = SimpleNamespace(whole=whole, make_tables=lambda rows: None)
    lines = Lines(lambda: passes, Remembered())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_omni.trainer.forecast.passes.in_forks", lambda work: [one() for one in work])
        said = lines.training(8, checkpointing=False, compiled=True, budget=0.5)
        assert lines.training(8, checkpointing=False, compiled=False, budget=0.5) == lines.training(8, False, False)
    assert said == Pass(kept=240, extra=10 + 24, forward=40, backward=48 + 4, block=24)
    assert asked == [(2, None), (3, None), (8, 1.0), (8, 0.5)]  # once


@pytest.mark.slow
def test_within_a_budget_a_block_keeps_less(tmp_path):
    costs = costs_of(tmp_path, "QwenImagePipeline", f"{MODEL}.lora_rank=4")
    found = [costs.passes.training(64, checkpointing=False, compiled=True, budget=b) for b in (1.0, 0.5, 0.1)]
    assert found[0].kept > found[1].kept > found[2].kept and found[0].extra < found[1].extra < found[2].extra
    assert found[0].backward <= found[1].backward < found[2].backward < found[0].backward + found[0].forward


@pytest.mark.slow
def test_a_compiled_block_keeps_less_and_computes_the_same(tmp_path):
    costs = costs_of(tmp_path, "QwenImagePipeline", f"{MODEL}.lora_rank=4")
    written, parted = (costs.passes.training(8, checkpointing=False, compiled=c) for c in (False, True))
    assert 0.4 * written.block < parted.block < 0.8 * written.block and parted.kept < written.kept
    assert (parted.forward, parted.backward) == (written.forward, written.backward)


@pytest.mark.slow  # tries each setting that might help, on modules of its own
def test_the_plan_names_stages_what_helps_and_the_best_way(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_omni.trainer.forecast.stages.LIBRARIES", 0)  # more than all of a tiny model
    overrides = overrides_of(tmp_path, tiny_checkpoint(), f"{ACTOR}.use_kl_loss=true")
    known = {}
    roomy = forecast(composed(*overrides), gpus=4, known=known)
    stages = {stage.name: stage for stage in roomy.asked.stages}
    assert list(stages) == ["load", "rollout", "decode", "reference", "update", "checkpoint"]
    (costs,) = known.values()
    assert stages["rollout"].device["whole model, gathered"] == 2 * costs.weights.numel
    assert not roomy.helps() and "For the marked one: trainer.n_gpus_per_node=" in text(roomy)
    assert {(way.layout.world, way.servers) for way in roomy.all()} >= {(4, 0), (2, 2), (1, 3)}
    tight = forecast(composed(*overrides), gpus=4, memory=stages["update"].peak / 2**30, gpu="h100", known=known)
    assert any(help.fits for help in tight.helps()["update"])
    page = text(tight)
    assert "The update does not fit into 92%" in page and "  fits  actor_rollout_ref." in page
    assert "H100 not timed" in page


def test_the_plan_advises_nothing_that_a_model_cannot_do(tmp_path):
    """No layer of tiny Z-Image can be held in 8 bits; some of tiny Qwen-Image's can."""
    for architecture, can in (("ZImagePipeline", False), ("QwenImagePipeline", True)):
        lora = overrides_of(tmp_path, tiny_checkpoint(architecture), f"{MODEL}.lora_rank=4")
        settings = OmegaConf.to_object(prepare_config(composed(*lora, f"{MODEL}.architecture={architecture}")))
        assert ({f"{MODEL}.base_precision": "int8"} in changes(settings, "checkpoint")) == can


def test_auto_plans_with_the_largest_number_that_leaves_a_tenth_free(tmp_path, monkeypatch):
    """Plans with numbers say which that is."""
    monkeypatch.setattr("verl_omni.trainer.forecast.stages.LIBRARIES", 0)  # more than all of a tiny model
    overrides, known = overrides_of(tmp_path, tiny_checkpoint(), f"{ACTOR}.engine.use_torch_compile=false"), {}

    def planned(rows: int | str, memory: float | None = None):
        more = f"{ACTOR}.ppo_micro_batch_size_per_gpu={rows}"
        return forecast(composed(*overrides, more), memory=memory, known=known)

    peak = {rows: next(s.peak for s in planned(rows).asked.stages if s.name == "update") for rows in (1, 8, 16)}
    assert peak[1] < peak[8] < peak[16]
    for rows in (1, 8):
        found = planned("auto", memory=peak[rows] * 1.001 / 0.9 / 2**30)
        assert found.asked.micro_batch == rows
        assert next(s.peak for s in found.asked.stages if s.name == "update") == peak[rows]
    assert planned("auto").asked.micro_batch == 8 * 9  # all pairs of a mini-batch
    assert "Micro-batch: up to 72 pairs fit" in text(planned("auto"))
    assert "Micro-batch" not in text(planned(8))


def test_what_it_cannot_take_is_one_line(monkeypatch):
    with pytest.raises(ValueError, match="^--gpu=h9: expected one of h200, h100, h800, a100, a800, l40s, b200$"):
        rates("h9", None)
    monkeypatch.setattr(sys, "argv", ["verl-omni plan", "data.train_files=x", "--devices", "2"])
    with pytest.raises(SystemExit, match="^error: --devices is for the folder of a run; with the arguments of train"):
        plan.main()
    assert plan.is_run(["outputs/run"]) and not plan.is_run(["qwen_image_ocr"]) and not plan.is_run(["a=b"])


VALUES = {"CogView4Pipeline", "GlmImagePipeline", "HunyuanVideo15Pipeline", "Lumina2Pipeline", "AceStepPipeline"}


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=row.name, marks=() if row.name in VALUES else pytest.mark.slow) for row in TABLE]
)
def test_every_architecture_has_a_plan(row, tmp_path):
    """Those in `VALUES` look at a mask, or at what is absent, before they compute."""
    picture(8, 8, 0).save(tmp_path / "one.png")
    images = (str(tmp_path / "one.png"),) if row.images else ()
    more = [f"{MODEL}.lora_rank={4 if row.lora else 0}", f"{ACTOR}.engine.use_torch_compile=false"]
    if "num_frames" in row.knobs(cfg=False):
        frames = 22 if row.name.startswith("MiniMaxH3") else 9
        more.append(f"actor_rollout_ref.rollout.pipeline.num_frames={frames}")
    found = forecast(composed(*overrides_of(tmp_path, tiny_checkpoint(row.name), *more, images=images)))
    peaks = {stage.name: stage.peak for stage in found.asked.stages}
    assert list(peaks) == ["load", "rollout", "decode", "update", "checkpoint"]
    assert min(peaks["rollout"], peaks["update"]) > peaks["load"]


@pytest.mark.slow
def test_the_command_takes_the_arguments_of_train(tmp_path):
    given = overrides_of(tmp_path, tiny_checkpoint())
    command = [sys.executable, "-m", "verl_omni.cli.main", "plan", *given, "--memory", "80"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and "| update |" in done.stdout and "s a step" in done.stdout, done.stderr


def test_what_the_plan_does_not_know_it_says(tmp_path):
    def asked(*more: str) -> list[str]:
        return not_counted(OmegaConf.to_object(composed(*overrides_of(tmp_path, tiny_checkpoint(), *more))))

    assert asked() == []
    assert asked("actor_rollout_ref.rewriter.path=x") == ["the rewriter"]
    assert asked(f"{ACTOR}.teacher.path=x") == ["the forwards of a teacher"]
    assert asked(f"{ACTOR}.strategy=veomni")[0].startswith("VeOmni's own kernels")
    draft = asked("actor_rollout_ref.model.algorithm=draft", f"{ACTOR}.diffusion_loss.loss_mode=draft")
    assert ["the decoder's activations and a reward's model" in line for line in draft] == [True]
    assert "while training goes on" in asked(f"{ACTOR}.checkpoint.async_save=true")[0]
    for away in (f"{ACTOR}.engine.sample_offload", "actor_rollout_ref.rollout.encoder_offload"):
        assert asked(f"{away}=true") == [
            "the seconds in which text encoders and samples go to the host's memory and back"
        ]
    assert asked(f"{ACTOR}.engine.param_offload=true", f"{ACTOR}.engine.optimizer_offload=true") == []
    assert asked("trainer.mode=separate") == ["the seconds that weights take to the rollout servers"]
    assert asked(f"{MODEL}.architecture=GlmImagePipeline") == ["the tokens that the model writes before it draws"]


def test_a_gradient_through_several_steps_keeps_the_activations_of_all(tmp_path):
    model = tiny_checkpoint()
    costs = costs_of(model, "QwenImagePipeline")
    costs.passes = SimpleNamespace(training=lambda *how: Pass(kept=1e9))
    draft = ["actor_rollout_ref.model.algorithm=draft", "reward.scorers=[{name: aesthetic, model: x}]"]

    def kept(steps: int) -> float:
        given = overrides_of(tmp_path, model, *draft, f"+{ACTOR}.diffusion_loss.extra.steps={steps}")
        settings = OmegaConf.to_object(prepare_config(composed(*given)))
        return RankMemory(costs, settings, amounts(settings), Layout(), 80e9).update().device["activations"]

    assert (kept(1), kept(3)) == (1e9, 3e9)


def test_a_model_of_ones_own_beside_a_lora_is_counted(tmp_path):
    """A whole one as large as the trained model's base; what is swapped in is as large as what is trained."""
    model, adapter = tiny_checkpoint(), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "pytorch_lora_weights.safetensors").touch()
    kl = (f"{ACTOR}.use_kl_loss=true", f"{MODEL}.lora_rank=4")
    costs = costs_of(model, "QwenImagePipeline", f"{MODEL}.lora_rank=4")
    base = costs.weights.numel - costs.weights.trained

    def held(*more: str) -> dict[str, float]:
        settings = OmegaConf.to_object(prepare_config(composed(*overrides_of(tmp_path, model, *kl, *more))))
        return RankMemory(costs, settings, amounts(settings), Layout(), 80e9).held

    reference = "actor_rollout_ref.ref"
    plain, whole, swapped = held(), held(f"{reference}.path={model}"), held(f"{reference}.path={adapter}")
    assert whole == plain | {"models of your own": base * costs.dtype.itemsize}
    assert swapped == plain | {"reference and other policies": costs.weights.trained_bytes()}
    teachers = held(f"{ACTOR}.teacher.path={{jpeg_compressibility: {model}, other: {adapter}}}")
    assert teachers == whole | swapped
    away = held(f"{reference}.path={model}", f"{reference}.param_offload=true")
    assert away == plain
    apart = held(f"{ACTOR}.teacher.path={model}", f"{ACTOR}.teacher.n_gpus_per_node=2")
    assert apart == plain


def test_teachers_on_devices_of_their_own_are_a_stage(tmp_path):
    """Two whole models on three devices, in the dtype of the computation; training has none of them."""
    model = tiny_checkpoint()
    two = f"{ACTOR}.teacher.path={{jpeg_compressibility: {model}, other: {model}}}"
    apart = (f"{ACTOR}.teacher.n_gpus_per_node=3", "data.train_batch_size=12")
    given = overrides_of(tmp_path, model, f"{MODEL}.lora_rank=4", two, *apart)
    found = forecast(composed(*given), gpus=4)
    assert (found.layout.world, found.gpus) == (1, 4)
    costs = found.ways.costs(found.ways.settings)
    (stage,) = (stage for stage in found.asked.stages if stage.name == "teacher")
    base = costs.weights.numel - costs.weights.trained
    assert stage.device["weights"] == 2 * base * costs.dtype.itemsize / 3
    assert "one trains, all draw, 3 hold teachers." in text(found)
    with pytest.raises(ValueError, match="--gpus=3: 3 of them hold teachers, and none is left to train"):
        forecast(composed(*given), gpus=3)


@pytest.mark.parametrize(
    ("lora", "behind", "ranks", "expected"),
    [
        (0, False, 8, {"exported files of a rank": 10e9}),
        (0, True, 2, {"exported files of a rank": 20e9, "a rank's copy of its state (async_save)": 16e9 * 3}),
        (4, False, 8, {"the adapter, whole, on the first rank": 32e9}),
    ],
)
def test_what_a_checkpoint_holds_in_the_hosts_memory(lora, behind, ranks, expected):
    """Of 32 GB that ranks share: all weights go out in files of 10 GB, of a rank one at a time unless it trains on."""
    rank = object.__new__(type("Alone", (RankMemory,), {"share": {}, "held": {}}))
    rank.actor = DiffusionActorConfig(checkpoint=CheckpointConfig(async_save=behind))
    rank.model, rank.amounts = SimpleNamespace(lora_rank=lora), SimpleNamespace(copies=0)
    rank.weights = SimpleNamespace(trained_bytes=lambda parts=1: 32e9 / parts, largest=0)
    rank.parts, rank.layout = ranks, SimpleNamespace(world=ranks, is_spread=True)
    assert rank.checkpoint().host == expected


@pytest.mark.parametrize(
    ("away", "pairs", "activations", "expected"),
    [
        (False, 8, 3e9, 8e9 + 16e9 + 8e9 + 3e9),
        (True, 8, 3e9, 8e9 + 8e9 + 3e9),  # activations are gone when a piece of the state comes
        (True, 8, 1e9, 8e9 + 8e9 + 2 * 2**30),
        (True, 4, 12e9, 8e9 + 12e9),
    ],
)
def test_state_on_the_host_is_on_the_device_piece_by_piece(away, pairs, activations, expected):
    """Of 8 GB of weights with AdamW, in micro-batches of four."""
    held = {} if away else {"optimizer state": 16e9}
    rank = object.__new__(type("Alone", (RankMemory,), {"share": {"weights": 8e9}, "held": held, "spread": {}}))
    rank.actor = DiffusionActorConfig(engine=EngineConfig(optimizer_offload=away), ppo_micro_batch_size_per_gpu=4)
    rank.model = SimpleNamespace(enable_gradient_checkpointing=False)
    rank.weights = SimpleNamespace(trained_bytes=lambda parts=1: 8e9 / parts)
    rank.parts, rank.layout = 1, Layout(replicate=1, shard=1, sequence=1)
    rank.amounts = SimpleNamespace(pairs=lambda layout: pairs, chained=1)
    rank.settings = SimpleNamespace(actor_rollout_ref=SimpleNamespace(actor=rank.actor))
    passes = SimpleNamespace(training=lambda *given: Pass(kept=activations))
    rank.costs = SimpleNamespace(passes=passes, latent_bytes=0, condition_bytes=0, own_part=lambda sequence: 1.0)
    stage = rank.update()
    assert stage.peak == pytest.approx(expected)
    assert stage.host == ({"optimizer state": 16e9} if away else {})
