"""Whole steps whose images are drawn in 8 bits: the ratio, the distance that is told, the KL, the pool, refusals."""

from types import SimpleNamespace

import pytest
import torch
from e2e_runs import metrics, settings
from refusals import prepared, refused
from tiny_models import tiny_checkpoint

from verl_omni.config import DiffusionRolloutConfig
from verl_omni.config.schema import RewardConfig
from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.trainer.diffusion.pool import chosen_seeds

A = "actor_rollout_ref."
FP8, REF, KL = f"{A}rollout.precision=fp8", f"{A}ref.precision=fp8", f"{A}actor.use_kl_loss=true"
GUIDED = [f"{A}rollout.pipeline.true_cfg_scale=4"]
LORA = [f"{A}model.lora_rank=4", f"{A}actor.optim.lr=1e-2"]
REWARD = "def compute_score(image):\n    return (sum(image.convert('L').resize((2, 2)).getdata()) % 97) / 97\n"


def run(folder, *overrides: str, steps: int = 2) -> dict[int, dict[str, float]]:
    folder.mkdir()
    (folder / "reward.py").write_text(REWARD)
    local_trainer(local_config(settings(
        folder / "run", f"reward.custom_reward_function.path={folder}/reward.py", "trainer.save_freq=0",
        f"trainer.total_training_steps={steps}", "data.val_files=null", *overrides,
    ))).fit()  # fmt: skip
    return metrics(folder / "run")


def test_the_first_ratio_is_exactly_1_and_the_distance_is_told(tmp_path, process_group):
    told = run(tmp_path / "a", FP8, *GUIDED, *LORA)
    for step in (1, 2):
        assert told[step]["actor/first_ratio_max_dev"] == 0.0
        assert told[step]["actor/old_log_probs_from_train"] == 1.0
        assert told[step]["rollout_corr/k3_kl"] > 0 and told[step]["actor/rollout_ratio_mean_dev"] > 1e-7
        assert told[step]["actor/grad_norm"] > 0
    exact = run(tmp_path / "b", *GUIDED, *LORA)
    assert "rollout_corr/k3_kl" not in exact[1]
    assert exact[1]["critic/rewards/mean"] != told[1]["critic/rewards/mean"], "other images"


def test_it_is_corrected_where_that_is_asked_for(tmp_path, process_group):
    told = run(tmp_path / "a", FP8, *GUIDED, *LORA, "algorithm.rollout_correction.rollout_is=step", steps=1)
    assert told[1]["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.1)
    assert told[1]["rollout_corr/rollout_is_std"] > 0 and told[1]["actor/first_ratio_max_dev"] < 1e-5


def test_a_reference_in_8_bits_begins_at_no_distance(tmp_path, process_group):
    """A fresh LoRA adds nothing: policy and reference are one, in 8 bits too, though training's numbers are others.

    Exactly so in forwards of as many rows. A matrix product of others may round its last bit differently (it does in
    x86's library), and what then crosses a boundary between two values of 8 bits is off by a sixteenth of itself.
    """
    whole = [KL, *GUIDED, *LORA, f"{A}actor.ppo_mini_batch_size=2"]  # one optimizer step, before which KL is told
    rough, full = (run(tmp_path / name, FP8, *whole, *more) for name, more in (("a", [REF]), ("b", [])))
    alone = [f"{A}rollout.{one}" for one in ("max_num_seqs=1", "cfg_in_one_forward=false")]
    alone.append(f"{A}ref.log_prob_micro_batch_size_per_gpu=1")
    assert run(tmp_path / "c", FP8, *whole, REF, *alone, steps=1)[1]["actor/kl_loss"] == 0
    assert rough[1]["actor/kl_loss"] < 1e-5 * rough[2]["actor/kl_loss"]
    assert rough[2]["actor/kl_loss"] > 1e-6
    assert rough[2]["actor/kl_loss"] == pytest.approx(full[2]["actor/kl_loss"], rel=0.5)
    assert [told[step]["actor/first_ratio_max_dev"] for told in (rough, full) for step in (1, 2)] == [0.0] * 4


def test_a_pool_in_8_bits_is_trained_exactly(tmp_path, process_group):
    pool = [f"{A}rollout.pool.size=6", f"{A}rollout.pool.precision=fp8", f"{A}rollout.n=2"]
    told = run(tmp_path / "a", *pool, *LORA, steps=1)[1]
    assert told["pool/drawn"] == 12 and told["actor/first_ratio_max_dev"] < 1e-5
    assert told["actor/old_log_probs_from_rollout"] == 1.0 and told["actor/rollout_ratio_max_dev"] < 1e-5


def test_a_pool_is_drawn_as_what_is_chosen_of_it():
    """Unless it says otherwise."""
    asked = []

    def rollout_batch(prompts, size, own, sampling, step, groups):
        asked.append(sampling.get("precision"))
        raise StopIteration

    for precision, own in (("fp8", None), (None, None), (None, "fp8")):
        pool = SimpleNamespace(size=4, num_inference_steps=2, precision=own)
        rollout = DiffusionRolloutConfig(precision=precision, pool=pool)
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout), reward=RewardConfig())
        with pytest.raises(StopIteration):
            chosen_seeds(SimpleNamespace(config=config, _rollout_batch=rollout_batch), torch.empty(0), 1, range(1))
    assert asked == ["fp8", None, "fp8"]


def test_servers_draw_in_8_bits_what_the_engine_beside_training_draws(tmp_path, process_group):
    """LoRA is in the 8 bits of both: the same images before its first step and after."""
    servers, beside = (run(tmp_path / name, FP8, *LORA, f"{A}hybrid_engine={name}") for name in ("false", "true"))
    for step in (1, 2):
        told = servers[step]
        assert told["actor/first_ratio_max_dev"] == 0.0 and told["rollout_corr/k3_kl"] > 0
        for name in ("critic/rewards/mean", "rollout_corr/k3_kl", "actor/rollout_ratio_mean_dev", "actor/grad_norm"):
            assert told[name] == beside[step][name], (step, name)


def test_what_cannot_be_is_refused_in_one_line():
    assert f'{A}rollout.precision "int8"' in refused(f"{A}rollout.precision=int8")
    assert "has no effect with actor_rollout_ref.rollout.precision=null" in refused(REF)
    assert "set actor_rollout_ref.actor.use_kl_loss=true" in refused(FP8, REF)
    assert "here another one draws" in refused(FP8, REF, KL, "trainer.mode=one_step_off")
    assert "old means of the training graph" in refused(FP8, REF, KL, f"{A}actor.old_log_probs=rollout")
    opd = (f"{A}model.algorithm=opd", f"{A}actor.teacher.path={tiny_checkpoint()}")
    assert 'loss "opd", which has no ratio' in refused(FP8, REF, KL, *opd)
    shared = (f"{A}actor.strategy=veomni", f"{A}actor.veomni_config.ulysses_parallel_size=2")
    assert "ranks that compute whole samples" in refused(FP8, REF, KL, *shared, "trainer.n_gpus_per_node=2")
    assert "where nothing is computed in 8 bits" in refused(f"{A}actor.engine.fp8_modules=[to_q]")
    assert "expected a list of names, such as [to_q" in refused(FP8, f"{A}actor.engine.fp8_modules=to_q")
    pool = f"{A}rollout.pool.size=32"
    assert "or actor_rollout_ref.rollout.pool.precision=fp8" in refused(pool)
    assert "or actor_rollout_ref.rollout.pool.precision=fp8" in refused(pool, FP8, f"{A}rollout.pool.precision=fp8")
    prepared(pool, f"{A}rollout.pool.precision=fp8")
    prepared(FP8, REF, KL, f"{A}actor.engine.fp8_modules=[to_q,to_k]")
