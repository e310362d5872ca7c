"""What only a worker would find is refused in one line before one starts: devices, engines, layers, files, packages."""

import importlib.util
import json
import time

import pytest
import torch
from refusals import prepared, refused
from safetensors.torch import save_file
from tiny_models import tiny_checkpoint

from verl_omni.config import DiffusionActorConfig, DiffusionModelConfig, FSDPConfig, VeOmniConfig
from verl_omni.config.actor import OPTIMIZERS
from verl_omni.trainer.checks.workers import check_training_engine, empty_modules
from verl_omni.workers import rollout
from verl_omni.workers.rollout.batched import BatchedRollout
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout
from verl_omni.workers.rollout.server import RolloutServer

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
ULYSSES = "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
LORA, INT8 = f"{MODEL}.lora_rank=4", f"{MODEL}.base_precision=int8"
BLOCKS, TWO_RANKS = f"{ROLLOUT}.gather=blocks", "trainer.n_gpus_per_node=2"
TOGETHER = f"{ROLLOUT}.share_samples=true"
BUDGET = f"{ACTOR}.engine.activation_memory_budget=0.5"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([f"{ACTOR}.fsdp_config.fsdp_size=3", "trainer.n_gpus_per_node=4"], "fsdp_size=3 does not divide the 4 ranks"),
        ([f"{ULYSSES}=2"], "ulysses_sequence_parallel_size=2 does not divide the 1 ranks that share the weights"),
        ([f"{ULYSSES}=3", "trainer.n_gpus_per_node=3"], "does not divide the 2 attention heads of QwenImageTransf"),
        (
            [f"{ULYSSES}=2", "trainer.n_gpus_per_node=2", f"{ACTOR}.engine.use_torch_compile=true"],
            "use_torch_compile=true does not go with actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel",
        ),
        ([f"{ACTOR}.engine.fold_lora=true"], "fold_lora=true does nothing without LoRA"),
        ([f"{ACTOR}.engine.compile_ahead=true", TWO_RANKS, f"{ULYSSES}=2"], "does nothing where ranks share samples"),
        (
            [f"{ACTOR}.engine.compile_ahead=true", f"{ACTOR}.ppo_micro_batch_size_per_gpu=auto"],
            "does nothing with ppo_micro_batch_size_per_gpu=auto, which is found after the first rollout",
        ),
        ([f"{ACTOR}.engine.compile_ahead=true", "trainer.device=cpu"], "compile_ahead=true does nothing on a CPU"),
        (
            [f"{ACTOR}.engine.compile_ahead=true", f"{ACTOR}.engine.use_torch_compile=false"],
            "compile_ahead=true does nothing without compiled blocks (use_torch_compile=false)",
        ),
        ([BUDGET, f"{ACTOR}.engine.use_torch_compile=false"], "budget=0.5 gains nothing without compiled blocks"),
        ([BUDGET, "trainer.device=cpu"], "budget=0.5 gains nothing on a CPU, where blocks are compiled with"),
        ([BUDGET, TWO_RANKS, f"{ULYSSES}=2"], "budget=0.5 gains nothing where ranks share samples"),
        ([BUDGET, f"{MODEL}.enable_gradient_checkpointing=true"], "where a block is computed again as a whole: leave"),
        ([BUDGET, f"{ACTOR}.ppo_micro_batch_size_per_gpu=auto"], "which is found with blocks that are not compiled"),
        (
            [f"{ACTOR}.engine.fold_lora=true", LORA, f"{ACTOR}.fsdp_config.fsdp_size=1", TWO_RANKS],
            "does nothing where each of 2 ranks holds the whole weights",
        ),
        ([BLOCKS], "gather=blocks has no effect with one device"),
        ([BLOCKS, TWO_RANKS, f"{ACTOR}.fsdp_config.fsdp_size=1"], "where each of 2 ranks holds the whole weights"),
        ([BLOCKS, TWO_RANKS, "actor_rollout_ref.rollout.precision=fp8"], "precision=fp8 needs the whole weights"),
        ([BLOCKS, TWO_RANKS, LORA, f"{ACTOR}.engine.fold_lora=true"], "fold_lora=true folds into"),
        ([BLOCKS, TWO_RANKS, "trainer.mode=separate"], "gather=blocks has no effect with actor_rollout"),
        ([TOGETHER, TWO_RANKS], "share_samples=true has no effect where no ranks share samples"),
        ([TOGETHER, TWO_RANKS, f"{ULYSSES}=2", BLOCKS], "share_samples=true does not go with"),
        ([TOGETHER, TWO_RANKS, f"{ULYSSES}=2", "trainer.mode=separate"], "share_samples=true has no effect with"),
        (["actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "a rollout server draws with one device"),
        ([LORA, INT8, f"{ACTOR}.engine.fold_lora=true"], "base_precision=int8: actor_rollout_ref.actor.engine.fold_"),
        ([INT8], "base_precision=int8 has no effect with actor_rollout_ref.model.lora_rank=0"),
        ([LORA, f"{MODEL}.target_modules=[to_q,to_qq]"], 'target_modules "to_qq": did you mean "to_q"'),
        ([LORA, f"{MODEL}.target_modules=nothing.*"], "target_modules=nothing.* matches no layer of QwenImageTransf"),
        ([LORA, f"{MODEL}.lora_path=/no/such/lora"], 'lora_path="/no/such/lora" holds no LoRA: expected a folder'),
        ([LORA, f"{MODEL}.lora_init=pissa"], "known: default, gaussian"),
        ([f"{ACTOR}.optim.betas=[0.9]"], "betas=[0.9]: expected two numbers"),
        ([f"{ACTOR}.optim.optimizer=SGD", f"{ACTOR}.optim.eps=1e-4"], "eps=0.0001 has no effect with"),
        ([f"{ACTOR}.optim.optimizer=Adafactor", f"{ACTOR}.optim.fused=true"], "torch has no fused Adafactor"),
        ([f"{ACTOR}.engine.attention_backend=flash_4", "trainer.device=cpu"], "flash_4 computes on a GPU only"),
        ([f"{ACTOR}.engine.attention_backend=_native_cudn"], 'did you mean "_native_cudnn"'),
        ([f"+{ROLLOUT}.engine_kwargs.decode_batch=2"], 'did you mean "decode_batch_size"'),
        ([f"+{ROLLOUT}.engine_kwargs.decode_batch_size=0"], "decode_batch_size=0: expected a whole number, 1 or more"),
        ([f"+{ROLLOUT}.engine_kwargs.device=cpu"], "known: decode_batch_size, prompt_cache_m"),
        (["trainer.logger=[]"], "trainer.logger=[] would leave no trace"),
        (["trainer.default_local_dir={file}"], "is a file, not a folder"),
        (["trainer.default_local_dir={file}/run"], "is a file, not a folder"),
        (["trainer.default_local_dir={loop}"], "cannot be made or opened: Too many levels of symbolic links"),
        (["trainer.default_local_dir={loop}/run"], "cannot be made or opened: Too many levels of symbolic links"),
    ],
)
def test_what_only_a_worker_would_find(overrides, said, tmp_path):
    places = {"file": tmp_path / "file", "loop": tmp_path / "loop"}
    places["file"].write_text("")
    places["loop"].symlink_to(places["loop"])
    assert said in refused(*[override.format(**places) for override in overrides])


@pytest.fixture
def engine_of_my_own(monkeypatch):
    """One that draws with the trained module, as diffusers' does, and one that only says that it draws."""
    monkeypatch.setattr(rollout._OWN, "_entries", dict(rollout._OWN._entries))
    monkeypatch.setattr("verl_omni.utils.registry.registrations", {})  # no worker is to import this file

    def add(name, **declared):
        bases = (BatchedRollout,) if name == "bare" else (DiffusersRollout,)
        rollout.register_rollout(name, server=RolloutServer)(type(name, bases, declared))

    return add


TOGETHER_ON_TWO = (TOGETHER, TWO_RANKS, f"{ULYSSES}=2")


@pytest.mark.parametrize("asked", [(BLOCKS, TWO_RANKS), TOGETHER_ON_TWO, (f"{ROLLOUT}.compile_vae=false",)])
def test_an_engine_that_draws_as_diffusers_does_is_asked_what_it_can(asked, engine_of_my_own):
    engine_of_my_own("mine")
    assert prepared(f"{ROLLOUT}.name=mine", *asked).actor_rollout_ref.rollout.name == "mine"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((BLOCKS, TWO_RANKS), "rollout.name=bare does not say that it can (`draws_by_blocks`); leave it out, or set"),
        (TOGETHER_ON_TWO, "rollout.name=bare does not say that it can (`draws_together`); leave it out"),
        ((f"{ROLLOUT}.encoder_offload=true",), "encoder_offload=true does nothing with actor_rollout_ref.rollout."),
        ((LORA, INT8), "rollout.name=bare holds weights in full, and would draw with others than training has; set"),
        ((f"{ROLLOUT}.precision=fp8",), "rollout.name=bare does not say that it can draw so (`precisions`)"),
    ],
)
def test_an_engine_that_says_nothing_of_itself_is_taken_at_its_word(asked, said, engine_of_my_own):
    engine_of_my_own("bare")
    assert said in refused(f"{ROLLOUT}.name=bare", *asked)


def test_an_engine_says_itself_what_it_cannot_draw(engine_of_my_own):
    def check(cls, settings):
        raise ValueError(f"mine draws no {settings.actor_rollout_ref.model.architecture}")

    engine_of_my_own("mine", check=classmethod(check), has_a_copy=True, draws_by_blocks=False)
    assert "mine draws no QwenImagePipeline" in refused(f"{ROLLOUT}.name=mine")
    engine_of_my_own("other", has_a_copy=True, draws_by_blocks=False)
    assert "rollout.name=other draws with a copy of its own" in refused(f"{ROLLOUT}.name=other", BLOCKS, TWO_RANKS)
    folded = (LORA, f"{ACTOR}.engine.fold_lora=true")
    assert "fold_lora=true does nothing with actor_rollout_ref" in refused(f"{ROLLOUT}.name=other", *folded)


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("vemlp_wandb", "volcengine_ml_platform")])
def test_a_tracker_whose_package_is_missing(tracker, package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == package else find(name, *a))
    assert f"{tracker}, which is not installed here: pip install {package}" in refused(f"trainer.logger=[{tracker}]")


def test_a_training_engine_whose_package_is_missing(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name == "veomni" else find(name, *a))
    assert "strategy=veomni: veomni is not installed here; type make veomni" in refused(f"{ACTOR}.strategy=veomni")


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("StableDiffusion3Pipeline", {}, "VeOmni has no SD3Transformer2DModel, only QwenImageTransformer2DModel and"),
        (
            "QwenImagePipeline",
            {"fsdp_config": FSDPConfig(fsdp_size=2)},
            "fsdp_config.fsdp_size=2 has no effect with actor_rollout_ref.actor.strategy=veomni, whose settings are in",
        ),
        (
            "QwenImagePipeline",
            {"veomni_config": VeOmniConfig(ulysses_parallel_size=3)},
            "ulysses_parallel_size=3 does not divide the 2 attention heads of QwenImageTransformer2DModel",
        ),
    ],
)
def test_what_veomni_cannot_train(name, settings, said):
    model = DiffusionModelConfig(path=str(tiny_checkpoint(name)))
    with pytest.raises(ValueError, match=said):
        check_training_engine(model, DiffusionActorConfig(strategy="veomni", **settings))


def test_settings_of_veomni_have_no_effect_on_another_engine():
    line = refused(f"{ACTOR}.veomni_config.fsdp_size=1")
    assert "veomni_config.fsdp_size=1 has no effect with actor_rollout_ref.actor.strategy=fsdp2" in line


def test_an_attention_kernel_whose_package_is_missing():
    """diffusers itself says what to install; no machine has this one, which needs another kind of accelerator."""
    line = refused(f"{ACTOR}.engine.attention_backend=_native_npu")
    assert line.startswith(f"{ACTOR}.engine.attention_backend=_native_npu: ") and "torch_npu" in line


def test_a_lora_file_of_another_rank(tmp_path):
    name = "transformer.transformer_blocks.0.attn.to_q.lora_A.weight"
    save_file({name: torch.zeros(8, 16)}, tmp_path / "pytorch_lora_weights.safetensors")
    assert "has LoRA of rank [8]" in refused(LORA, f"{MODEL}.lora_path={tmp_path}")
    (tmp_path / "pytorch_lora_weights.safetensors").write_text("no tensors")
    assert "is no readable safetensors file" in refused(LORA, f"{MODEL}.lora_path={tmp_path}")


def test_good_targets_kernels_and_arguments_pass():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Backends

    before = Backends.get_active_backend()
    assert prepared(LORA, f"{MODEL}.target_modules=[to_q,img_mlp.net.2]", f"{ACTOR}.engine.attention_backend=flex")
    assert Backends.get_active_backend() == before  # a check changes nothing for what this process computes
    assert prepared(LORA, f"{MODEL}.target_modules='.*to_q'", f"+{ROLLOUT}.engine_kwargs.prompt_cache_size=8")
    for name in OPTIMIZERS:
        assert prepared(f"{ACTOR}.optim.optimizer={name}", f"{ACTOR}.optim.lr_scheduler_type=cosine")


def test_twenty_billion_parameters_cost_seconds(tmp_path):
    """The layers' names are known without their weights."""
    config = {"_class_name": "QwenImageTransformer2DModel", "num_layers": 60}
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer/config.json").write_text(json.dumps(config))
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    start = time.process_time()
    (part,) = empty_modules(DiffusionModelConfig(path=str(tmp_path)))
    assert sum(p.numel() for p in part.parameters()) > 20e9 and next(part.parameters()).is_meta
    assert time.process_time() - start < 10


def test_eight_bits_where_no_layer_is_wide_enough():
    line = refused(LORA, INT8, architecture="ZImagePipeline")
    assert "base_precision=int8 is for layers whose inputs are multiples of 64, and none of this model's" in line


def test_lora_where_diffusers_has_none():
    sized = [f"{ROLLOUT}.pipeline.{name}=512" for name in ("height", "width")]
    line = refused(f"{MODEL}.lora_rank=4", *sized, architecture="LongCatAudioDiTPipeline")
    assert "diffusers' LongCatAudioDiTTransformer takes no LoRA; train all its weights, lora_rank=0" in line
