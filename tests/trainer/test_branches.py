"""`rollout.algo.branches`: an ODE walk to one step, stochastic branches from one state, the ODE to the end."""

import pytest
import torch
from e2e_runs import metrics, run_here, settings
from refusals import refused
from test_architectures import PROMPTS, SEQUENCE, TABLE, config, rollout, shrink_references

from verl_omni.pipelines.drawing import Request

ALGO = "actor_rollout_ref.rollout.algo"


def drawn(engine, row, requests: list[dict]) -> list:
    tokenizers = engine.adapter.load_tokenizers(engine.model_config)

    def ids(text: str) -> list[int]:
        return engine.adapter.tokenize(tokenizers, text, SEQUENCE, row.images and row.images[0])

    images = row.images and row.images[0]
    asked = [Request(ids(PROMPTS[0]), ids(row.negative), images, {"keep_trajectory": True} | r) for r in requests]
    return engine.run_batch(asked)


@pytest.mark.parametrize("row", [TABLE[0], TABLE[2]], ids=lambda row: row.name)
def test_branches_part_from_one_state_and_cost_nothing_before(row):
    """Two states that part at steps 1 and 2 of 4, two branches of each, in an order that mixes them."""
    shrink_references()
    engine = rollout(config(row, cfg=False, noise=0.7))
    rows, steps = [], engine.adapter.num_steps(engine.model_config)
    hook = engine.module.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(next(v for v in [*args, *kwargs.values()] if torch.is_tensor(v)))),
        with_kwargs=True,
    )
    states = [("a", 1), ("b", 2), ("a", 1), ("b", 2)]
    requests = [
        {"seed": 10 + i, "init_seed": ord(name), "branch": name, "sde_window": (k, k + 1)}
        for i, (name, k) in enumerate(states)
    ]
    together = drawn(engine, row, requests)
    assert rows == [2, 3] + [4] * (steps - 2)  # a state walks once until its branches part
    hook.remove()
    alone = [drawn(engine, row, [request])[0] for request in requests]
    for one, other in zip(together, alone, strict=True):
        for name in ("all_latents", "final_latents", "rollout_log_probs"):
            torch.testing.assert_close(one.trajectory[name], other.trajectory[name], atol=2e-5, rtol=1e-5)
    begin, end = ([sample.trajectory["all_latents"][i] for sample in together] for i in (0, 1))
    assert torch.equal(begin[0], begin[2]) and torch.equal(begin[1], begin[3])  # to the last bit
    assert not torch.equal(begin[0], begin[1]) and not torch.equal(end[0], end[2])


def test_a_run_compares_branches_of_one_state_alone(tmp_path, monkeypatch, process_group):
    """With four images of two states a prompt; advantages add up to 0 within each two."""
    seen = []
    from verl_omni.trainer.diffusion import policy_gradient_trainer as trainer

    compute = trainer.compute_advantage
    monkeypatch.setattr(trainer, "compute_advantage", lambda *a, **k: seen.append(compute(*a, **k)) or seen[-1])
    (tmp_path / "reward.py").write_text(
        "def compute_score(image):\n    return (sum(image.convert('L').resize((2, 2)).getdata()) % 97) / 97\n"
    )
    arguments = settings(
        tmp_path / "run", f"{ALGO}.branches=2", "actor_rollout_ref.model.algorithm=tempflow_grpo",
        "reward.custom_reward_function.path=reward.py", "trainer.total_training_steps=2", "data.val_files=null",
        "trainer.save_freq=0",
    )  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert told[1]["actor/first_ratio_max_dev"] < 1e-6 and told[1]["actor/grad_norm"] > 0
    assert told[1]["critic/rewards/group_size"] == 2
    batch = seen[0]
    uids = batch.non_tensor_batch["uid"].tolist()
    assert sorted(set(uids)) == ["0-0/0", "0-0/1", "0-1/0", "0-1/1"] and batch.batch["advantages"].shape == (8, 1)
    for uid in set(uids):
        own = batch.batch["advantages"][[i for i, other in enumerate(uids) if other == uid]]
        assert own.abs().sum() > 0 and abs(own.sum()) < 1e-5
    assert len({tuple(t) for t in batch.batch["all_timesteps"].tolist()}) > 1  # states part at different steps


def test_what_is_no_branch_is_refused_in_one_line():
    assert "does not divide actor_rollout_ref.rollout.n=16" in refused(f"{ALGO}.branches=3")
    assert "set actor_rollout_ref.rollout.algo.sde_window_size=1" in refused(
        f"{ALGO}.branches=2", f"{ALGO}.sde_window_size=2"
    )
    assert "branches=2 has no effect with algorithm.trainer_type=direct_preference" in refused(
        f"{ALGO}.branches=2", "actor_rollout_ref.model.algorithm=dpo"
    )
