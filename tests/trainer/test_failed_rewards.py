"""Samples without a score leave: what the others teach is what a batch without them would teach."""

import math
from types import SimpleNamespace

import pytest
import torch
from e2e_runs import metrics, run_here, settings
from verl.protocol import DataProto

from verl_omni.trainer.diffusion.failed_rewards import scored_part, scored_rows
from verl_omni.trainer.diffusion.gaps import rows_and_shares
from verl_omni.utils.arrays import object_array
from verl_omni.utils.errors import RunError
from verl_omni.workers.engine.reverse_steps import ReverseSteps
from verl_omni.workers.layout import Layout

NAN = math.nan


def batch(rewards: list[float], group: int) -> DataProto:
    return DataProto.from_dict(
        {"sample_level_rewards": torch.tensor(rewards)},
        {
            "uid": object_array([str(i // group) for i in range(len(rewards))]),
            "reward_failure": object_array(["it broke" if math.isnan(r) else None for r in rewards]),
        },
    )


def test_a_group_needs_two_scores():
    assert scored_rows(batch([1, 2, NAN, 3, NAN, NAN, 4, NAN, 5], 3)).tolist() == [1, 1, 0, 0, 0, 0, 1, 0, 1]
    kept, part = scored_part(batch([1, 2, NAN, 3], 2), 1)
    assert kept.tolist() == [True, True, False, False] and part.batch["sample_level_rewards"].tolist() == [1, 2]
    assert part.meta_info["failed"] == 1


def test_a_step_without_any_score_ends_the_run():
    with pytest.raises(RunError, match="no prompt of step 7 has two images with a score: it broke"):
        scored_part(batch([NAN, 1.0, NAN, NAN], 2), 7)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("minis", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize("rejected", [False, True], ids=["samples", "steps"])
def test_the_gradient_is_the_mean_over_what_is_left(ranks, minis, size, rejected):
    """Of samples without a score, or of single steps. Any number stands for a pair's gradient; ranks average theirs."""
    torch.manual_seed(minis)
    rows, steps = 16, 3
    kept = torch.rand(rows, steps if rejected else 1) > 0.4
    kept.reshape(ranks, minis, -1)[0, :, 0] = True
    kept.reshape(ranks, minis, -1)[:, -1] &= minis == 1  # nothing is left of the last mini-batch
    kept = kept.expand(rows, steps).contiguous()
    value = torch.randn(rows, steps, dtype=torch.float64)
    replay = ReverseSteps.__new__(ReverseSteps)
    replay.engine = SimpleNamespace(whole_units=lambda pairs: pairs, layout=Layout(), device=torch.device("cpu"))
    chosen, share, alive = rows_and_shares(kept, minis, ranks)
    assert alive == max(1, minis - 1) and len(chosen) == len(share) == rows // minis * alive
    by_mini = torch.arange(rows).reshape(ranks, minis, -1)
    for mini, (there, its_share) in enumerate(
        zip(chosen.reshape(ranks, alive, -1).unbind(1), share.reshape(ranks, alive, -1, steps).unbind(1), strict=True)
    ):
        found = []
        for rank in range(ranks):
            own = there[rank]
            data = {
                "all_timesteps": torch.zeros(len(own), steps),
                "all_latents": torch.zeros(len(own), steps + 1),
                "advantages": value[own],
                "share": its_share[rank],
            }
            parts = [(replay.take(data, part)["advantages"], part.share) for part in replay.split(data, size)]
            found.append(sum(advantages.mean() * share for advantages, share in parts))
        real = by_mini[:, mini].reshape(-1)
        expected = value[real][kept[real]].mean()
        torch.testing.assert_close(sum(found) / ranks, expected)


REWARD = """
import collections
seen = collections.Counter()

def compute_score(image, prompt):
    seen[prompt] += 1
    if seen[prompt] in ({bad}):
        raise ConnectionError("the judge is away")
    return (sum(image.convert("L").resize((2, 2)).getdata()) % 97) / 97
"""


ONE_PROMPT = """
seen = []

def compute_score(image, prompt):
    seen.append(prompt)
    if prompt == seen[0]:
        raise ConnectionError("the judge is away")
    return (sum(image.convert("L").resize((2, 2)).getdata()) % 97) / 97
"""


@pytest.mark.parametrize(
    ("algorithm", "reward"),
    [
        ("flow_grpo", REWARD.format(bad="2,")),
        ("diffusion_nft", REWARD.format(bad="2,")),
        ("dpo", REWARD.format(bad="2,")),
        ("flow_grpo", ONE_PROMPT),
    ],
    ids=["flow_grpo", "diffusion_nft", "dpo", "a whole group"],
)
def test_a_run_goes_on_without_them(tmp_path, monkeypatch, process_group, capsys, algorithm, reward):
    (tmp_path / "reward.py").write_text(reward)
    arguments = settings(
        tmp_path / "run", f"actor_rollout_ref.model.algorithm={algorithm}", "actor_rollout_ref.rollout.n=4",
        "reward.custom_reward_function.path=reward.py", "reward.retries=0", "trainer.total_training_steps=2",
        "data.val_files=null",
    )  # fmt: skip
    run_here(arguments, tmp_path, monkeypatch)
    first = metrics(tmp_path / "run")[1]
    assert first["reward/failed"] >= 1 and first["actor/grad_norm"] > 0
    assert "images have no score" in (said := capsys.readouterr().out)
    assert reward != ONE_PROMPT or "step 1: 4 of 8 images have no score, 4 are learned from" in said
