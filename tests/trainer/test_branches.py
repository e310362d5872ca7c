"""`rollout.algo.branches`: an ODE walk to one step, stochastic branches from one state, the ODE to the end."""

import pytest
import torch
from e2e_runs import back_to, metrics, run_here, settings
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


REWARD = "def compute_score(image):\n    return (sum(image.convert('L').resize((2, 2)).getdata()) % 97) / 97\n"


def branched(folder, name: str, *overrides: str) -> list[str]:
    (folder / "reward.py").write_text(REWARD)
    return settings(
        folder / name, f"{ALGO}.branches=2", "actor_rollout_ref.model.algorithm=tempflow_grpo",
        "reward.custom_reward_function.path=reward.py", "data.val_files=null", "trainer.save_freq=0",
        "actor_rollout_ref.actor.optim.lr=0.01", "trainer.total_training_steps=2", *overrides,
    )  # fmt: skip


def test_a_run_compares_branches_of_one_state_alone(tmp_path, monkeypatch, process_group):
    """With four images of two states a prompt; advantages add up to 0 within each two."""
    seen = []
    from verl_omni.trainer.diffusion import policy_gradient_trainer as trainer

    compute = trainer.compute_advantage
    monkeypatch.setattr(trainer, "compute_advantage", lambda *a, **k: seen.append(compute(*a, **k)) or seen[-1])
    run_here(branched(tmp_path, "run"), tmp_path, monkeypatch)
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


def test_a_run_goes_on_bit_for_bit(tmp_path, monkeypatch, process_group):
    """Its states are those of the step, whatever was drawn before it in the process."""
    arguments = branched(tmp_path, "run", "trainer.save_freq=1", "trainer.total_training_steps=3")
    run_here(arguments, tmp_path, monkeypatch)
    straight = metrics(tmp_path / "run")
    back_to(1, tmp_path / "run")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(tmp_path / "run") == straight and straight[2] != straight[3]


def test_other_modes_draw_the_same_branches(tmp_path, monkeypatch, process_group):
    """Servers that draw in turn with training give the same numbers, those that run ahead the same first step. Where
    they draw on and on, other images are in a forward, and round otherwise."""
    run_here(branched(tmp_path, "run"), tmp_path, monkeypatch)
    own = metrics(tmp_path / "run")
    for mode, behind in (("separate", 0), ("one_step_off", 1), ("fully_async", 1)):
        ahead = [f"trainer.max_staleness={behind}"] if behind else []
        run_here(branched(tmp_path, mode, f"trainer.mode={mode}", *ahead), tmp_path, monkeypatch)
        found = metrics(tmp_path / mode)
        assert found[2]["staleness/max"] == behind and found[2]["critic/rewards/group_size"] == 2
        for step in (1,) if behind else (1, 2):
            same = {key: found[step][key] for key in own[step]}
            assert same == (own[step] if mode != "fully_async" else pytest.approx(own[step], rel=1e-5, abs=1e-6)), mode


def test_what_is_no_branch_is_refused_in_one_line():
    assert "does not divide actor_rollout_ref.rollout.n=16" in refused(f"{ALGO}.branches=3")
    assert "set actor_rollout_ref.rollout.algo.sde_window_size=1" in refused(
        f"{ALGO}.branches=2", f"{ALGO}.sde_window_size=2"
    )
    assert "branches=2 has no effect with algorithm.trainer_type=direct_preference" in refused(
        f"{ALGO}.branches=2", "actor_rollout_ref.model.algorithm=dpo"
    )
