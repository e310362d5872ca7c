"""`rollout.pool`: the best and the worst of many cheap images are drawn again, exactly, from the same noise."""

import math

import pytest
from e2e_runs import back_to, metrics, run_here, settings
from refusals import refused

from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.trainer.diffusion.pool import best_and_worst

POOL, ROLLOUT = "actor_rollout_ref.rollout.pool", "actor_rollout_ref.rollout"
NAN = math.nan


@pytest.mark.parametrize(
    ("scores", "count", "kept"),
    [
        ([0.1, 0.9, 0.5, 0.3, 0.7], 2, [1, 0]),
        ([0.1, 0.9, 0.5, 0.3, 0.7], 3, [1, 4, 0]),
        ([0.1, 0.9, 0.5, 0.3, 0.7], 4, [1, 4, 3, 0]),
        ([0.1, NAN, 0.5, 0.3, NAN], 2, [2, 0]),  # a reward that failed is neither good nor bad
        ([NAN, NAN, 0.5, 0.3, NAN], 4, [2, 3, 0, 1]),
        ([0.5, 0.5, 0.5], 2, [0, 2]),
    ],
)
def test_which_are_kept(scores, count, kept):
    assert best_and_worst(scores, count) == kept


REWARD = "def compute_score(image):\n    return (sum(image.convert('L').resize((2, 2)).getdata()) % 97) / 97\n"


@pytest.mark.parametrize("algorithm", ["awm", "flow_grpo"])
def test_they_are_drawn_again_from_the_same_noise(tmp_path, monkeypatch, process_group, algorithm):
    """Six cheap images of each prompt in two steps; two of them in four."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    trainer = local_trainer(local_config(settings(
        tmp_path / "run", f"actor_rollout_ref.model.algorithm={algorithm}", f"{POOL}.size=6",
        f"{POOL}.num_inference_steps=2", f"{ROLLOUT}.n=2", "reward.custom_reward_function.path=reward.py",
        "trainer.total_training_steps=1", "data.val_files=null", "trainer.save_freq=0",
    )))  # fmt: skip
    asked, start = [], trainer.agent_loop_manager.start_images

    def seen(batch, images_to=None):
        wait = start(batch, images_to)

        def drawn():
            output, collect = wait()
            scores = collect()
            asked.append((batch.meta_info["sampling_params"], list(batch.non_tensor_batch["seed"]), scores))
            return output, lambda: scores

        return drawn

    trainer.agent_loop_manager.start_images = seen
    trainer.fit()
    (cheap, seeds, scores), (exact, chosen, _) = asked
    assert (cheap["num_inference_steps"], exact["num_inference_steps"]) == (2, 4)
    assert (cheap["noise_level"], "keep_trajectory" in cheap) == (0.0, False)
    assert len(set(seeds)) == 12 and len(chosen) == 4
    values = scores.batch["rm_scores"][:, 0].tolist()
    for prompt in range(2):
        own = dict(zip(values[6 * prompt : 6 * prompt + 6], seeds[6 * prompt : 6 * prompt + 6], strict=True))
        assert chosen[2 * prompt : 2 * prompt + 2] == [own[max(own)], own[min(own)]]
    told = metrics(tmp_path / "run")[1]
    assert told["pool/drawn"] == 12 and told["pool/gap"] > 0 and told["actor/grad_norm"] > 0
    assert told["pool/reward_mean"] == pytest.approx(sum(values) / 12)
    assert told.get("actor/first_ratio_max_dev", 0.0) < 1e-5  # exact: the ratio is to what was drawn


def pooled(folder, name: str, *overrides: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD)
    return settings(
        folder / name, "actor_rollout_ref.model.algorithm=awm", f"{POOL}.size=6", f"{POOL}.num_inference_steps=2",
        f"{ROLLOUT}.n=2", "reward.custom_reward_function.path=reward.py", "data.val_files=null",
        "actor_rollout_ref.actor.optim.lr=0.01", "trainer.save_freq=1", *overrides,
    )  # fmt: skip


def test_a_run_with_a_pool_goes_on_bit_for_bit(tmp_path, monkeypatch, process_group):
    run_here(pooled(tmp_path, "run"), tmp_path, monkeypatch)
    straight = metrics(tmp_path / "run")
    back_to(1, tmp_path / "run")
    run_here(pooled(tmp_path, "run"), tmp_path, monkeypatch)
    assert metrics(tmp_path / "run") == straight
    assert len({told["pool/reward_mean"] for told in straight.values()}) == 3  # each step has a pool of its own


def test_servers_rank_and_draw_with_the_weights_of_their_step(tmp_path, monkeypatch, process_group):
    run_here(pooled(tmp_path, "run"), tmp_path, monkeypatch)
    run_here(pooled(tmp_path, "apart", "trainer.mode=separate"), tmp_path, monkeypatch)
    own, apart = metrics(tmp_path / "run"), metrics(tmp_path / "apart")
    assert own[1]["pool/gap"] > 0 and own[3]["pool/gap"] != own[1]["pool/gap"]
    for step in own:
        assert apart[step]["staleness/max"] == 0
        assert {key: apart[step][key] for key in own[step]} == own[step]


def test_what_is_no_pool_is_refused_in_one_line():
    on = (f"{POOL}.size=32", f"{POOL}.num_inference_steps=2")
    assert "expected more than actor_rollout_ref.rollout.n=16" in refused(f"{POOL}.size=16", on[1])
    assert "below the rollout's own 4" in refused(on[0]) and "below the rollout's own 4" in refused(
        on[0], f"{POOL}.num_inference_steps=4"
    )
    assert "same_initial_noise=true gives to several" in refused(*on, "actor_rollout_ref.model.algorithm=dance_grpo")
    assert "so does algorithm.filter_groups" in refused(*on, "algorithm.filter_groups.enable=true")
    assert "set trainer.mode=colocated or separate" in refused(*on, "trainer.mode=one_step_off")
    assert "set trainer.mode=colocated" in refused(*on, "trainer.mode=fully_async", "trainer.max_staleness=0")
    assert "has no effect with actor_rollout_ref.rollout.pool.size=null" in refused(on[1])
