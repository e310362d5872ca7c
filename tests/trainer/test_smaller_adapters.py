"""A reference or teacher that is a LoRA of a smaller rank, or of fewer modules: what diffusers computes with it."""

import diffusers
import pytest
import torch
from e2e_runs import metrics, run_here, settings
from peft import LoraConfig, get_peft_model_state_dict
from preference_cases import make_batch, make_engine
from safetensors.torch import load_file, save_file
from tiny_models import tiny_checkpoint

from verl_omni.testing.local_trainer import local_config

FILE = "pytorch_lora_weights.safetensors"
# Another alpha too; modules of unequal ranks; a file that tells nothing but its tensors.
ADAPTERS = {
    "rank": {"r": 2, "lora_alpha": 6, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]},
    "modules": {"r": 4, "lora_alpha": 8, "target_modules": ["to_q"]},
    "both": {"r": 3, "lora_alpha": 5, "target_modules": ["to_v", "to_k"], "rank_pattern": {"to_k": 1}},
    "tells nothing": {"r": 2, "lora_alpha": 2, "target_modules": ["to_v"]},
}


def adapter_of(folder, tells: bool = True, **settings):
    """An adapter that peft has made and diffusers has written, of random weights."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_checkpoint())
    config = LoraConfig(**settings)
    pipe.transformer.add_adapter(config)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in pipe.transformer.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    told = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    pipe.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(pipe.transformer),
        transformer_lora_adapter_metadata=told if tells else None,
    )
    return folder


def velocities(engine, policy: str) -> torch.Tensor:
    data = make_batch(make_engine(tiny_checkpoint(), "awm"))
    return engine.before_update(data, {"ref_velocity": policy})["ref_velocity"]


@pytest.mark.parametrize("name", ADAPTERS)
def test_it_computes_what_diffusers_computes(process_group, tmp_path, name):
    folder = adapter_of(tmp_path / "adapter", tells=name != "tells nothing", **ADAPTERS[name])
    engine = make_engine(tiny_checkpoint(), "awm", lora=True)  # of rank 4 with alpha 8
    engine.keep_reference(path=str(folder))
    plain = make_engine(tiny_checkpoint(), "awm")
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_checkpoint())
    without = velocities(plain, "current")
    pipe.load_lora_weights(folder, weight_name=FILE)
    plain.module = pipe.transformer.eval()
    found, expected = velocities(engine, "reference"), velocities(plain, "current")
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (expected - without).abs().max() > 1e-2 and not torch.equal(found, velocities(engine, "current"))


def test_a_student_of_a_larger_rank_learns_from_it(process_group, tmp_path, monkeypatch):
    folder = adapter_of(tmp_path / "adapter", **ADAPTERS["both"])
    arguments = settings(
        tmp_path / "run", "actor_rollout_ref.model.algorithm=opd_forward", "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.model.lora_alpha=8", f"actor_rollout_ref.actor.teacher.path={folder}",
        "actor_rollout_ref.actor.optim.lr=0.01", "data.val_files=null", "trainer.save_freq=0",
    )  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    distance = [told["actor/teacher_distance"] for step, told in sorted(metrics(tmp_path / "run").items())]
    assert 0 < distance[-1] < distance[0]


def without_some(folder) -> None:
    state = load_file(folder / FILE)
    save_file({name: value for name, value in state.items() if ".lora_B." not in name}, folder / FILE)


def of_another_model(folder) -> None:
    state = load_file(folder / FILE)
    save_file({f"text_encoder.{name}": value for name, value in state.items()}, folder / FILE)


def of_two_ranks(folder) -> None:
    save_file(load_file(folder / FILE), folder / FILE)  # without what it tells


@pytest.mark.parametrize(
    ("change", "given", "said"),
    [
        (None, {"r": 5}, r"has rank 5 for transformer\..*rank 4: .* verl-omni export RUN OUT --format merged"),
        (None, {"target_modules": ["to_q", "img_mod.1"]}, "or not under its target_modules.: merge it into its base"),
        (None, {"use_rslora": True}, "peft's use_rslora=True, which is not known here: merge"),
        (without_some, {}, "an A and a B for transformer.* that do not belong together"),
        (of_another_model, {}, "holds no LoRA weights for transformer: expected diffusers' format"),
        (of_two_ranks, {"rank_pattern": {"to_q": 1}}, r"has ranks \[1, 2\] and does not tell its alpha: merge"),
    ],
)
def test_what_is_no_part_of_the_trained_one_is_refused_in_one_line(tmp_path, change, given, said):
    folder = adapter_of(tmp_path / "adapter", **ADAPTERS["rank"] | given)
    if change is not None:
        change(folder)
    kl = ("actor_rollout_ref.actor.use_kl_loss=true", f"actor_rollout_ref.ref.path={folder}")
    with pytest.raises(ValueError, match=f"actor_rollout_ref.ref.path=.*{said}"):
        local_config(settings(tmp_path / "run", "actor_rollout_ref.model.lora_rank=4", "data.val_files=null", *kl))
