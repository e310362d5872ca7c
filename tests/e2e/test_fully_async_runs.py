"""Whole runs whose servers draw on beside the training: equal to others where they have to be, and replayed."""

import json

import pyarrow.parquet as pq
import pytest
from e2e_runs import LEARNING, Run, metrics, prompts, run_here, settings

from verl_omni.data.prompt_dataset import user_text
from verl_omni.testing.local_trainer import local_config
from verl_omni.trainer.checks.preflight import check_start
from verl_omni.utils.errors import RunError

pytestmark = pytest.mark.timeout(1500)

# Brightness. A prompt named in `slow` has its score only when so many steps have been taken; one in `fails`, never.
REWARD = """
import asyncio, json, pathlib

HERE = pathlib.Path(__file__).parent

async def compute_score(image, prompt):
    order = json.loads((HERE / "orders.json").read_text())
    taken = HERE / "run/order.jsonl"
    wanted = order["slow"].get(prompt, 0)
    while wanted and (not taken.exists() or taken.read_text().count("\\n") < wanted):
        await asyncio.sleep(0.01)
    if prompt in order["fails"]:
        raise ValueError("not this one")
    pixels = list(image.convert("L").getdata())
    return sum(pixels) / len(pixels) / 255
"""
ASYNC = ("trainer.mode=fully_async", "reward.custom_reward_function.path=reward.py")
PLAIN = ("data.shuffle=false", "trainer.val_before_train=false", "trainer.test_freq=0", "trainer.save_freq=0")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Runs in one folder: the name of a run, what its rewards do, its settings."""

    def run(name: str, *overrides: str, slow=None, fails=()) -> dict:
        (tmp_path / "reward.py").write_text(REWARD)
        (tmp_path / "orders.json").write_text(json.dumps({"slow": slow or {}, "fails": list(fails)}))
        run_here(settings(name, *overrides), tmp_path, monkeypatch)
        return metrics(tmp_path / name)

    run.folder = tmp_path
    return run


def texts() -> list[str]:
    return [user_text(row["prompt"]) for row in pq.read_table(prompts() / "train.parquet").to_pylist()]


def order(run_dir) -> list[list[dict]]:
    return [json.loads(line)["data"]["groups"] for line in (run_dir / "order.jsonl").read_text().splitlines()]


def without(found: dict, *prefixes: str) -> dict:
    return {step: {k: v for k, v in row.items() if not k.startswith(prefixes)} for step, row in found.items()}


def test_without_staleness_every_number_is_that_of_the_synchronous_run(here):
    """LoRA, KL, an average, guidance, a window, shuffling, validation: bit for bit."""
    learning = [one for one in LEARNING if "killer" not in one]
    expected = here("colocated", *learning, "reward.custom_reward_function.path=reward.py")
    found = here("run", *learning, *ASYNC, "trainer.max_staleness=0")
    assert all(found[step]["staleness/max"] == 0 == found[step]["queue/dropped"] for step in (1, 2, 3))
    assert without(found, "queue/", "staleness/", "rollout/server_restarts") == expected
    assert [[(g["group"], g["version"]) for g in step] for step in order(here.folder / "run")] == [
        [(0, 0), (1, 0)], [(2, 1), (3, 1)], [(4, 2), (5, 2)],
    ]  # fmt: skip


# At the first score of a training step, one of the servers is killed.
KILL_A_SERVER = (
    REWARD
    + """
import os, signal
score, validation = compute_score, 2

async def compute_score(image, prompt):
    global validation
    validation -= 1
    if validation == -1:
        servers = []
        for folder in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                mine = str(HERE) in (folder / "environ").read_text()
                if mine and "DiffusersServer" in (folder / "cmdline").read_text():
                    servers.append(int(folder.name))
            except OSError:
                continue
        (HERE / "killed").write_text(str(len(servers)))
        os.kill(max(servers), signal.SIGKILL)
    return await score(image, prompt)
"""
)


@pytest.mark.slow  # trainer/test_server_restarts.py has a server that dies, the next test two servers in one process
def test_servers_in_processes_of_their_own_of_which_one_dies_and_their_run_again_in_one(here):
    """What two servers drew, whenever it came in, one draws again; LoRA, KL, an average, guidance, validation."""
    learning = [one for one in LEARNING if "killer" not in one]
    many = (*learning, *ASYNC, "trainer.max_staleness=1", "trainer.save_freq=0")
    (here.folder / "reward.py").write_text(KILL_A_SERVER)
    (here.folder / "orders.json").write_text(json.dumps({"slow": {}, "fails": []}))
    said = Run(settings("run", *many, "rollout.n_gpus_per_node=2"), here.folder).succeed()
    assert (here.folder / "killed").read_text() == "2" and said.count("has died and is started again") == 1
    took, found = order(here.folder / "run"), metrics(here.folder / "run")
    assert found[3]["rollout/server_restarts"] == 1
    assert sorted(g["group"] for step in took for g in step) == list(range(6)), "none is lost, none is trained twice"
    assert found[1]["staleness/max"] == 0 and found[2]["staleness/max"] == 1 >= found[3]["staleness/max"]
    written = [json.loads(line)["data"] for line in (here.folder / "run/metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["idle/training"] <= 1 and 0 <= line["idle/rollout"] <= 1 for line in written[1:])
    again = here("again", *many, "trainer.replay=run")
    assert list(again) == list(found)
    for step, row in without(again, "queue/", "rollout/server_restarts").items():
        # What had to be drawn anew may have shared its forward with others: rounding may move a pixel by 1 of 255.
        assert row == pytest.approx(without(found, "queue/", "rollout/server_restarts")[step], rel=2e-2, abs=1e-5)


def test_what_is_overtaken_is_dropped_and_drawn_anew_and_all_of_it_can_be_replayed(here):
    """The first group has its score when three steps were taken: it is three steps behind then, and one is allowed."""
    many = (*ASYNC, *PLAIN, "trainer.max_staleness=1", "trainer.total_training_steps=4", "rollout.n_gpus_per_node=2")
    many += ("actor_rollout_ref.actor.optim.lr=0.003",)
    found = here("run", *many, slow={texts()[0]: 3})
    took = order(here.folder / "run")
    assert sorted(g["group"] for step in took for g in step) == list(range(8))
    last = {g["group"]: g for g in took[3]}
    assert last[0]["version"] == 3 and last[0]["drawn_with"] == [0]
    assert sum(found[step]["queue/dropped"] for step in found) >= 1
    assert max(found[step]["staleness/max"] for step in found) == 1
    assert found[2]["actor/rollout_ratio_max_dev"] > 1e-5  # earlier weights drew it

    again = here("again", *many, "trainer.replay=run")
    assert order(here.folder / "again") == took
    assert without(again, "queue/") == without(found, "queue/")


def test_a_run_that_died_goes_on_with_the_prompts_that_it_has_not_trained(here):
    """The first group is overtaken by all others but the last, which ends the run in its third step."""
    first, *_, last = texts()
    saved = (*ASYNC, *(one for one in PLAIN if "save" not in one), "trainer.save_freq=1", "reward.on_failure=stop")
    with pytest.raises(RunError, match="not this one"):
        here("run", *saved, slow={first: 2, last: 2}, fails=[last])
    folder = here.folder / "run"
    assert [sorted(g["prompt"] for g in step) for step in order(folder)] == [[1, 2], [3, 4]]
    state = json.loads((folder / "global_step_2/trainer.json").read_text())["data"]
    assert state["groups"] == {"first": 0, "trained": [1, 2, 3, 4]}

    with pytest.raises(ValueError, match="would train them twice: go on with trainer.mode=fully_async"):
        check_start(local_config(settings("run", *saved, "trainer.mode=separate")))
    found = here("run", *saved)
    assert list(found) == [1, 2, 3]
    took = order(folder)
    assert [(g["prompt"], g["version"]) for g in took[2]] == [(0, 2), (5, 2)]
    page = (folder / "report.html").read_text()
    assert "Who did what in the last steps" in page and '"who": "rollout 0", "spans": [["' in page

    again = here("again", *saved, "trainer.replay=run")  # both of its starts
    assert without(again, "queue/") == without(found, "queue/")
    with pytest.raises(ValueError, match="trainer.replay draws with the weights of every step from the first one on"):
        check_start(local_config(settings("again", *saved, "trainer.replay=run")))


def test_preferences_are_learned_from_groups_of_several_versions(here):
    more = ("actor_rollout_ref.model.algorithm=dpo", "trainer.max_staleness=1", "trainer.stale_groups=keep")
    found = here("run", *ASYNC, *PLAIN, *more)
    took = order(here.folder / "run")
    assert sorted(g["group"] for step in took for g in step) == list(range(6))
    assert found[2]["staleness/max"] == 1 and all(found[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))


@pytest.mark.parametrize("mode", ["one_step_off", "fully_async"])
@pytest.mark.parametrize("algorithm", ["awm", "diffusion_nft", "dgpo", "crd", "tempflow_grpo", "flash_grpo"])
def test_a_loss_compares_with_the_policy_that_drew(here, algorithm, mode):
    """The ratio to it is 1 where nothing has moved, and is not where training has gone on."""
    more = (f"trainer.mode={mode}", "trainer.max_staleness=1", f"actor_rollout_ref.model.algorithm={algorithm}")
    own = ("reward.custom_reward_function.path=reward.py", "actor_rollout_ref.actor.optim.lr=0.003")
    one_update = ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)
    found = here("run", *PLAIN, *own, *more, *one_update)
    assert [found[step]["staleness/max"] for step in (1, 2)] == [0, 1]
    assert all(found[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))
    if algorithm == "crd":  # its implicit reward is how far the policy is from the one that drew
        assert found[1]["actor/implicit_reward_abs"] < 1e-5 < found[2]["actor/implicit_reward_abs"]
    elif algorithm != "diffusion_nft":
        assert found[1]["actor/first_ratio_max_dev"] < 1e-6
        assert found[2]["actor/first_ratio_max_dev"] > 1e-5
