"""`ref.path`: an adapter or a model of the user's own as the reference, beside LoRA and beside all weights."""

import json
import os
import shutil

import diffusers
import pytest
import torch
import torch.distributed as dist
from e2e_runs import metrics, run_here, settings
from preference_cases import make_batch, make_engine, weights
from ranks import start_ranks
from refusals import prepared, refused
from safetensors.torch import load_file, save_file
from tiny_models import tiny_checkpoint

from verl_omni.testing.local_trainer import local_config
from verl_omni.trainer.checks.frozen import check_folder
from verl_omni.trainer.checks.preflight import check_start

REF, MODEL, ACTOR = "actor_rollout_ref.ref", "actor_rollout_ref.model", "actor_rollout_ref.actor"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
LORA = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8")
KL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.optim.lr=0.01", "data.val_files=null")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The tiny model with weights that were moved."""
    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny_checkpoint(), folder)
    state, generator = load_file(folder / WEIGHTS), torch.Generator().manual_seed(3)
    save_file({k: v + 0.02 * torch.randn(v.shape, generator=generator) for k, v in state.items()}, folder / WEIGHTS)
    return folder


# Models, the name that each gives to its depth, and the scale that is no guidance.
DEEPER = {"QwenImagePipeline": ("num_layers", 1.0), "ZImagePipeline": ("n_layers", 0.0)}


@pytest.fixture(scope="module", params=DEEPER)
def deeper(request, tmp_path_factory):
    """An architecture, and a model of its family with a block more: its transformer alone."""
    folder = tmp_path_factory.mktemp("deeper")
    config = json.loads((tiny_checkpoint(request.param) / "transformer/config.json").read_text())
    torch.manual_seed(0)
    kind, depth = getattr(diffusers, config["_class_name"]), DEEPER[request.param][0]
    model = kind.from_config(config | {depth: config[depth] + 1})
    with torch.no_grad():
        for parameter in model.parameters():  # Z-Image begins its paddings as they come
            parameter.normal_(std=0.05)
    model.save_pretrained(folder / "transformer")
    return request.param, folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, process_group):
    """An adapter of rank 4 that is away from where training begins."""
    folder = tmp_path_factory.mktemp("adapter")
    make_engine(tiny_checkpoint(), "awm", lora=True).save_checkpoint(str(folder))
    return folder / "export"


def an_engine(architecture: str = "QwenImagePipeline", lora: bool = False):
    return make_engine(tiny_checkpoint(architecture), "awm", lora=lora, guidance_scale=DEEPER[architecture][1])


def velocities(engine, policy: str) -> torch.Tensor:
    data = make_batch(an_engine(engine.model_config.architecture))  # the same samples for everybody
    return engine.before_update(data, {"ref_velocity": policy})["ref_velocity"]


def diffusers_own(folder, architecture: str = "QwenImagePipeline") -> torch.Tensor:
    """What plain diffusers' transformer of the folder says in the place of an engine's."""
    engine = an_engine(architecture)
    engine.module = type(engine.module).from_pretrained(folder, subfolder="transformer").eval()
    return velocities(engine, "current")


@pytest.mark.parametrize("lora", [True, False])
def test_a_model_is_the_reference_of_a_lora_and_of_all_weights(process_group, other, lora):
    engine = make_engine(tiny_checkpoint(), "awm", lora=lora)
    before, now = weights(engine), velocities(engine, "current")
    engine.keep_reference(path=str(other))
    found = velocities(engine, "reference")
    assert torch.equal(found, diffusers_own(other)) and not torch.equal(found, now)
    assert torch.equal(velocities(engine, "current"), now)
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    assert "reference" not in engine.policies.state_dict()  # in no checkpoint


@pytest.mark.parametrize("lora", [True, False])
def test_it_may_have_more_blocks(process_group, deeper, lora):
    architecture, folder = deeper
    engine = an_engine(architecture, lora)
    check_folder("ref.path", folder, engine.model_config)
    engine.keep_reference(path=str(folder))
    assert torch.equal(velocities(engine, "reference"), diffusers_own(folder, architecture))


def test_what_computes_something_else_is_refused(tmp_path, other):
    """Its tensors fit, and it is another model: here with positions that turn in another way."""
    kl, turned, older = f"{ACTOR}.use_kl_loss=true", tmp_path / "turned", tmp_path / "older"
    config = json.loads((other / "transformer/config.json").read_text())
    axes = config["axes_dims_rope"]
    without = {name: value for name, value in config.items() if name != "zero_cond_t"}  # of an older diffusers
    for folder, told in ((turned, config | {"axes_dims_rope": [*axes[1:], axes[0]]}), (older, without)):
        shutil.copytree(other, folder)
        (folder / "transformer/config.json").write_text(json.dumps(told))
    for training in (LORA, ()):
        assert "has axes_dims_rope=" in refused(kl, *training, f"{REF}.path={turned}")
    assert prepared(kl, f"{REF}.path={older}") is not None


@pytest.mark.parametrize("training", [LORA, ()])
def test_tensors_that_nobody_would_look_at_are_refused(tmp_path, other, training):
    more = shutil.copytree(other, tmp_path / "more")
    state = load_file(more / WEIGHTS)
    save_file(state | {"guidance.weight": torch.zeros(3)}, more / WEIGHTS)
    with pytest.raises(ValueError, match=r"has guidance.weight for transformer, which the trained model has not"):
        local_config(settings(tmp_path / "run", *KL, *training, f"{REF}.path={more}"))


def test_an_adapter_of_more_layers_is_refused(tmp_path, adapter):
    fewer = (f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[to_q]")
    with pytest.raises(ValueError, match=r"which the trained model has not \(or not under its target_modules\): merge"):
        local_config(settings(tmp_path / "run", *KL, *fewer, f"{REF}.path={adapter}"))


def test_an_adapter_is_swapped_in(process_group, adapter):
    engine = make_engine(tiny_checkpoint(), "awm", lora=True)
    was = velocities(engine, "current")
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.add_(0.3)
    engine.keep_reference(path=str(adapter))
    assert torch.equal(velocities(engine, "reference"), was) and not torch.equal(velocities(engine, "current"), was)


@pytest.mark.parametrize("training", [LORA, ()])
def test_the_model_itself_named_changes_no_number(tmp_path, monkeypatch, process_group, training):
    run_here(settings("plain", *KL, *training), tmp_path, monkeypatch)
    run_here(settings("named", *KL, *training, f"{REF}.path={tiny_checkpoint()}"), tmp_path, monkeypatch)
    told = metrics(tmp_path / "named")
    assert told == metrics(tmp_path / "plain") and told[3]["actor/kl_loss"] > 0


def test_a_run_with_one_goes_on_bit_for_bit_and_not_with_another(tmp_path, monkeypatch, process_group, other):
    own = shutil.copytree(other, tmp_path / "own")
    arguments = settings(tmp_path / "run", *KL, *LORA, f"{REF}.path={own}", "trainer.save_freq=1")
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert told[1]["actor/kl_loss"] > 0  # before the first update the policy is another than the reference
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/global_step_{step}")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("1")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(tmp_path / "run") == told
    shutil.copy(tiny_checkpoint() / WEIGHTS, own / WEIGHTS)
    with pytest.raises(ValueError, match=r"actor_rollout_ref.ref.path: .* has other content"):
        check_start(local_config([*arguments, "trainer.total_training_steps=4"]))


def rank_main(rank: int, folder: str, path: str, other: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "store"), 2))
    engine = make_engine(path, "awm", lora=True)
    engine.keep_reference(path=other)
    data = torch.load(os.path.join(folder, "data.pt"))
    found = engine.before_update(data, {"ref_velocity": "reference"})["ref_velocity"]
    torch.testing.assert_close(found, torch.load(os.path.join(folder, "velocity.pt")), atol=1e-5, rtol=0)
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_share_a_model_of_its_own(tmp_path, process_group, other):
    torch.save(make_batch(make_engine(tiny_checkpoint(), "awm")), tmp_path / "data.pt")
    torch.save(diffusers_own(other), tmp_path / "velocity.pt")
    start_ranks(rank_main, args=(str(tmp_path), str(tiny_checkpoint()), str(other)))


def test_what_is_no_reference_is_refused_in_one_line(tmp_path, monkeypatch, other, adapter):
    kl, named = f"{ACTOR}.use_kl_loss=true", f"{REF}.path={other}"
    assert prepared(kl, named).actor_rollout_ref.ref.path == str(other)
    assert prepared(f"{MODEL}.algorithm=dpo", named) is not None
    assert 'has no effect: loss "flow_grpo" compares with no reference' in refused(named)
    assert "is no folder" in refused(kl, f"{REF}.path=/nowhere")
    assert "holds no transformer/*.safetensors" in refused(kl, f"{REF}.path={tmp_path}")
    assert "--format merged" in refused(kl, f"{REF}.path={adapter}")
    assert "holds no LoRA weights" in refused(kl, *LORA, f"{REF}.path={tmp_path}")
    sd3 = tiny_checkpoint("StableDiffusion3Pipeline")
    assert "is a SD3Transformer2DModel, and the trained model a" in refused(kl, f"{REF}.path={sd3}")
    fp8 = ("actor_rollout_ref.rollout.precision=fp8", f"{REF}.precision=fp8", "trainer.device=cuda")
    assert "is a model of its own: leave the precision out" in refused(kl, *LORA, named, *fp8)
    wide = tmp_path / "wide"
    shutil.copytree(other, wide)
    state = load_file(wide / WEIGHTS)
    name = next(name for name in sorted(state) if state[name].ndim == 2)
    save_file(state | {name: torch.zeros(3, 5)}, wide / WEIGHTS)
    for training in (LORA, ()):
        with pytest.raises(ValueError, match=r"ref.path=.*wide has shape \(3, 5\) for transformer"):
            local_config(settings(tmp_path / "run", *KL, *training, f"{REF}.path={wide}"))
    with pytest.raises(ValueError, match=r"has rank 4 for .*, and the trained LoRA rank 2: .* --format merged"):
        local_config(settings(tmp_path / "run", *KL, f"{MODEL}.lora_rank=2", f"{REF}.path={adapter}"))
