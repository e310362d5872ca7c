"""The real command for each loss: online and resumed, tied rewards, offline without a rollout engine, overfitting."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from e2e_runs import QuickRun, command_here, metrics, prompts, run_here, settings
from PIL import Image
from safetensors.torch import load_file
from test_offline_pairs import write_jsonl
from tiny_models import tiny_checkpoint

from verl_omni.data.prepare_offline_dpo import prepare

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

SD3 = "StableDiffusion3Pipeline"


def exported(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    files = sorted((run_dir / f"global_step_{step}" / "export").rglob("*.safetensors"))
    assert files
    return {f"{file.name}/{k}": v for file in files for k, v in load_file(file).items()}


def test_nft_goes_on_from_a_checkpoint_bit_for_bit(tmp_path, monkeypatch, capsys):
    """The old policy samples and follows slowly: had it not been saved, nothing after the resume would be the same."""
    run_dir = tmp_path / "run"
    arguments = settings(
        run_dir,
        "actor_rollout_ref.model.algorithm=diffusion_nft",
        "actor_rollout_ref.rollout.pipeline.guidance_scale=1",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "algorithm.old_policy_decay=0.7",
        "algorithm.timesteps_per_sample=2",
        "algorithm.timestep_distribution=logit_normal",
        "actor_rollout_ref.actor.shuffle=true",
        "trainer.save_freq=1",
        "trainer.val_before_train=false",
        model=tiny_checkpoint(SD3),
    )
    run_here(arguments, tmp_path, monkeypatch)
    straight, weights = metrics(run_dir), exported(run_dir, 3)
    assert straight[3]["training/old_policy_decay"] == 0.7 and straight[3]["actor/old_distance"] > 0
    for step in (2, 3):
        shutil.rmtree(run_dir / f"global_step_{step}")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("1")
    assert "Resuming from" not in capsys.readouterr().out
    run_here(arguments, tmp_path, monkeypatch)
    assert "Resuming from" in capsys.readouterr().out
    assert metrics(run_dir) == straight
    assert all(torch.equal(value, weights[name]) for name, value in exported(run_dir, 3).items())
    assert not torch.equal(*(next(iter(exported(run_dir, step).values())) for step in (2, 3)))


@pytest.mark.parametrize(
    ("algorithm", "extra", "told"),
    [("dgpo", "anchor=ema", "group_weight"), ("crd", "temperature=0.5", "implicit_error")],
    ids=["dgpo", "crd"],
)
def test_losses_of_whole_groups_go_on_from_a_checkpoint_bit_for_bit(tmp_path, monkeypatch, algorithm, extra, told):
    """Several updates of a rollout, in micro-batches that cut groups."""
    run_dir = tmp_path / "run"
    arguments = settings(
        run_dir,
        f"actor_rollout_ref.model.algorithm={algorithm}",
        f"+actor_rollout_ref.actor.diffusion_loss.extra.{extra}",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.shuffle=true",
        "algorithm.timesteps_per_sample=1",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "data.val_files=null",
    )
    run_here(arguments, tmp_path, monkeypatch)
    straight, weights = metrics(run_dir), exported(run_dir, 2)
    assert straight[1]["actor/first_ratio_max_dev"] < 1e-5 < straight[1]["actor/ratio_max_dev"]
    assert straight[2][f"actor/{told}"] > 0
    shutil.rmtree(run_dir / "global_step_2")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("1")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(run_dir) == straight
    assert all(torch.equal(value, weights[name]) for name, value in exported(run_dir, 2).items())


def test_the_average_that_dgpo_compares_with_is_behind_the_policy(tmp_path, monkeypatch):
    """By default. With one update a step the policy would otherwise be compared with itself, and s be 0."""
    arguments = settings(
        tmp_path / "run",
        "actor_rollout_ref.model.algorithm=dgpo",
        "+actor_rollout_ref.actor.diffusion_loss.extra.anchor=ema",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "trainer.total_training_steps=2",
        "trainer.save_freq=0",
        "data.val_files=null",
    )
    run_here(arguments, tmp_path, monkeypatch)
    found = metrics(tmp_path / "run")
    assert found[1]["actor/group_weight"] == pytest.approx(0.5, abs=1e-6)
    assert abs(found[2]["actor/group_weight"] - 0.5) > 1e-3
    assert found[2]["training/old_policy_decay"] == 0.9


def test_awm_trains_all_weights_with_every_anchor(tmp_path, monkeypatch):
    extra = "actor_rollout_ref.actor.diffusion_loss.extra"
    arguments = settings(
        tmp_path / "run",
        "actor_rollout_ref.model.algorithm=awm",
        f"{extra}.kl_beta=0.1",
        f"{extra}.ema_kl_beta=0.1",
        "algorithm.timestep_distribution=rollout",
        "algorithm.timestep_fraction=0.5",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.ppo_epochs=2",
    )
    run_here(arguments, tmp_path, monkeypatch)
    found = metrics(tmp_path / "run")
    assert found[1]["actor/first_ratio_max_dev"] < 1e-5 < found[1]["actor/ratio_max_dev"]
    assert found[2]["actor/kl_loss"] > 0 and found[2]["actor/ema_kl_loss"] > 0
    assert found[2]["training/old_policy_decay"] == pytest.approx(0.002)
    assert any(name.startswith("val-core/") for name in found[2])


def test_online_dpo_without_any_difference_changes_nothing_and_says_so(tmp_path, monkeypatch):
    (tmp_path / "flat.py").write_text("def compute_score(image):\n    return 0.5\n")
    arguments = settings(
        tmp_path / "run",
        "actor_rollout_ref.model.algorithm=dpo",
        "reward.custom_reward_function.path=flat.py",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=false",
    )
    run_here(arguments, tmp_path, monkeypatch)
    (found,) = metrics(tmp_path / "run").values()
    assert (found["dpo/pairs"], found["dpo/groups_without_pair"], found["training/skipped_updates"]) == (0, 2, 1)
    assert "actor/grad_norm" not in found
    start = load_file(tiny_checkpoint() / "transformer" / "diffusion_pytorch_model.safetensors")
    after = exported(tmp_path / "run", 1)
    assert all(torch.equal(after[f"diffusion_pytorch_model.safetensors/{name}"], start[name]) for name in start)


# In every process of the run: what offline training must not start or load.
NO_ROLLOUT = """
import verl_omni.agent_loop, verl_omni.rewards.reward_loop
from verl_omni.pipelines.model_base import DiffusionModelBase

def refuse(*args, **kwargs):
    raise AssertionError("offline training started or loaded a part of the rollout")

verl_omni.agent_loop.DiffusionAgentLoopManager.__init__ = refuse
verl_omni.rewards.reward_loop.RewardLoopManager.__init__ = refuse
DiffusionModelBase.load_pipeline = refuse
DiffusionModelBase.load_tokenizers = refuse
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Two pairs of one prompt: bright images are preferred to dark ones."""
    folder = tmp_path_factory.mktemp("pairs")
    rng, rows = np.random.default_rng(0), []
    for i in range(2):
        for side, light in (("chosen", 160), ("rejected", 0)):
            Image.fromarray(rng.integers(light, light + 96, (32, 32, 3), dtype=np.uint8)).save(
                folder / f"{i}_{side}.png"
            )
        rows.append({"prompt": "a bright sky"} | {side: f"{i}_{side}.png" for side in ("chosen", "rejected")})
    write_jsonl(folder, rows)
    return prepare(tiny_checkpoint(), folder, folder / "cache", height=32, width=32, device="cpu")


def test_offline_dpo_overfits_one_prompts_pairs_without_a_rollout_engine(tmp_path, cache):
    (tmp_path / "no_rollout.py").write_text(NO_ROLLOUT)
    arguments = settings(
        tmp_path / "run",
        "actor_rollout_ref.model.algorithm=dpo",
        "algorithm.sample_source=offline",
        f"data.train_files={cache}",
        "data.val_files=null",
        "actor_rollout_ref.model.external_lib=no_rollout",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.diffusion_loss.extra.beta=100",
        "algorithm.timesteps_per_sample=8",
        "trainer.total_training_steps=20",
        "trainer.save_freq=0",
    )
    QuickRun(arguments, tmp_path).succeed()
    found = metrics(tmp_path / "run")
    assert found[1]["actor/implicit_margin"] == pytest.approx(0, abs=1e-5)  # the policy is still the reference
    assert all(found[step]["actor/implicit_accuracy"] == 1 for step in range(16, 21))
    assert found[20]["actor/implicit_margin"] > 1
    assert not any(name.startswith("critic/rewards") for name in found[1])


def test_prompts_in_place_of_a_cache_are_named(tmp_path, monkeypatch, capsys):
    arguments = settings(
        tmp_path / "run",
        "actor_rollout_ref.model.algorithm=dpo",
        "algorithm.sample_source=offline",
        "data.val_files=null",
        f"data.train_files={prompts() / 'train.parquet'}",
    )
    code, output = command_here(arguments, tmp_path, monkeypatch, capsys)
    assert code != 0
    assert output.strip().splitlines()[-1].startswith("error: data.train_files=")
    assert "prepare_offline_dpo" in output and "Traceback" not in output
    assert not (tmp_path / "run").exists()
