"""Servers and rewards that go on beside the training: with which weights, held up by what, and ended by what.

Nothing here draws an image: a test says when a server or a reward is done.
"""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.protocol import DataProto

from verl_omni.data.prompt_loader import create_dataloader
from verl_omni.report.timeline import Timeline
from verl_omni.trainer.callbacks import Run
from verl_omni.trainer.diffusion.fully_async import FullyAsync
from verl_omni.trainer.diffusion.pace import DrawnGroup
from verl_omni.trainer.diffusion.rollouts import Weights
from verl_omni.utils.arrays import object_array
from verl_omni.utils.background import start, wait_for

B, N = 2, 3


class Prompts:
    """Eight of them, as a data set."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return {"prompt": f"prompt {i}", "index": i, "dummy_tensor": torch.zeros(1)}


class Gates:
    """What is named here does not go on until it is opened."""

    def __init__(self):
        self.closed: dict[str, asyncio.Event] = {}

    def close(self, *names: str) -> None:
        self.closed |= {name: asyncio.Event() for name in names}

    def open(self, name: str) -> None:
        async def set_it() -> None:
            self.closed.pop(name).set()

        wait_for(set_it())

    async def __call__(self, name: str) -> None:
        if name in self.closed:
            await self.closed[name].wait()


class Trainer:
    """As far as a pace asks it. It notes what is drawn by whom, with which weights."""

    def __init__(self, run_dir, max_staleness=2, servers=1, total_steps=4, stale_groups="drop", state=None, done=0):
        options = {"max_staleness": max_staleness, "stale_groups": stale_groups, "replay": None}
        rollout = SimpleNamespace(n=N, max_num_seqs=N)
        config = SimpleNamespace(
            trainer=SimpleNamespace(**options),
            data=SimpleNamespace(train_batch_size=B),
            actor_rollout_ref=SimpleNamespace(rollout=rollout, hybrid_engine=False),
        )
        self.loader = create_dataloader(Prompts(), B, shuffle=False, seed=0)
        if state is not None:
            self.loader.load_state_dict(state)
        self.trained_groups = (state or {}).get("groups")
        self.run = Run(config, run_dir, total_steps, done)
        self.timeline, self.gates, self.num_servers, self.group_filter = Timeline(), Gates(), servers, None
        self.held: dict[int, int] = {}
        self.drawn: list[tuple[str, int, int]] = []  # uid, server, version
        self.fails: dict[str, Exception] = {}

    def publish(self):
        return Weights("current", self.run.step, f"weights {self.run.step}")

    async def draw_groups(self, server, prompts, step, groups, newest, learns):
        prompts.non_tensor_batch["uid"] = object_array([f"{step}-{group}" for group in groups])
        weights = newest()
        assert weights.stored == f"weights {weights.version}"
        self.held[server] = weights.version
        drawn = [prompts[[i]].repeat(N) for i in range(len(prompts))]
        return weights.version, [DrawnGroup("e", rows, self._drawing(rows, server)) for rows in drawn]

    async def _drawing(self, rows, server):
        uid = rows.non_tensor_batch["uid"][0]
        await self.gates(f"draw {uid}")
        self._fail(f"draw {uid}")
        version = self.held[server]
        self.drawn.append((uid, server, version))
        columns = {"version": object_array([version] * len(rows))}
        told = DataProto.from_dict({"x": torch.zeros(len(rows))}, columns, meta_info={"timing": {"images": 1.0}})
        return told, self._scoring(uid, rows)

    async def _scoring(self, uid, rows):
        await self.gates(f"score {uid}")
        self._fail(f"score {uid}")
        rewards = torch.zeros(len(rows), 1)
        return DataProto.from_dict({"rm_scores": rewards}, meta_info={"timing": {"rewards": 0.0}})

    def _fail(self, what):
        if what in self.fails:
            raise self.fails[what]

    def scored_rows(self, rows, result):
        result.non_tensor_batch = {**rows.non_tensor_batch, **result.non_tensor_batch}
        return result

    def experience(self, names, version, step, output, scores):
        return SimpleNamespace(names=names, version=version, step=step, batch=output, scores=scores())


@pytest.fixture
def paces():
    """Makes them, and ends them."""
    made = []

    def make(trainer: Trainer) -> FullyAsync:
        made.append(FullyAsync(trainer, trainer.loader, trainer.run, trainer.trained_groups))
        return made[-1]

    yield make
    for pace in made:
        pace.close()


def learn(pace: FullyAsync) -> list[tuple[str, int]]:
    """One training step: (uid, version) of its groups."""
    experience = pace.next()
    told = experience.scores.non_tensor_batch["uid"][::N].tolist(), experience.batch.non_tensor_batch["version"][::N]
    assert experience.step == pace.run.step and experience.version == min(told[1])
    pace.run.step += 1
    return list(zip(*told, strict=True))


def until(happened) -> None:
    """Let the servers go on until this is so."""

    async def wait() -> None:
        while not happened():
            await asyncio.sleep(0.001)

    wait_for(asyncio.wait_for(wait(), 20))


def settled_for_a_while() -> None:
    """Whatever could go on by itself has."""
    wait_for(asyncio.sleep(0.1))


def uids(trainer: Trainer) -> list[str]:
    return [uid for uid, *_ in trainer.drawn]


def test_servers_go_on_while_a_step_is_learned_as_far_as_they_may(tmp_path, paces):
    trainer = Trainer(tmp_path, max_staleness=2)
    pace = paces(trainer)
    assert learn(pace) == [("0-0", 0), ("0-1", 0)]
    settled_for_a_while()
    assert uids(trainer) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]  # (2 + 1) batches, and no more
    assert learn(pace) == [("1-0", 0), ("1-1", 0)]
    until(lambda: len(trainer.drawn) == 8)
    assert trainer.drawn[-2:] == [("3-0", 0, 1), ("3-1", 0, 1)]


def test_without_staleness_nothing_is_drawn_ahead(tmp_path, paces):
    trainer = Trainer(tmp_path, max_staleness=0, servers=2)
    pace = paces(trainer)
    for step in range(4):
        assert learn(pace) == [(f"{step}-0", step), (f"{step}-1", step)]
        settled_for_a_while()
        assert len(trainer.drawn) == B * (step + 1)


def test_what_is_being_drawn_finishes_on_its_weights_and_the_next_has_new_ones(tmp_path, paces):
    trainer = Trainer(tmp_path, max_staleness=1)
    pace = paces(trainer)
    trainer.gates.close("draw 1-0")
    learn(pace)  # and the server is at 1-0 now, with weights of version 0
    until(lambda: len(trainer.drawn) == 2)

    async def release() -> None:
        while pace.weights.version < 1:
            await asyncio.sleep(0.001)
        trainer.gates.closed.pop("draw 1-0").set()

    released = start(release())
    assert learn(pace) == [("1-0", 0), ("1-1", 1)]
    released.result()


def test_a_slow_reward_holds_no_server_up_and_is_overtaken(tmp_path, paces):
    trainer = Trainer(tmp_path, max_staleness=2)
    pace = paces(trainer)
    trainer.gates.close("score 0-0")
    assert learn(pace) == [("0-1", 0), ("1-0", 0)]
    settled_for_a_while()
    assert "2-1" in uids(trainer)
    trainer.gates.open("score 0-0")
    until(lambda: "0-0" in [group.scores.non_tensor_batch["uid"][0] for group in pace.queue.scored])
    assert learn(pace) == [("1-1", 0), ("2-0", 0)]
    assert learn(pace) == [("0-0", 0), ("2-1", 0)]
    told = (tmp_path / "order.jsonl").read_text().splitlines()
    assert len(told) == 3 and '"group": 0, "prompt": 0, "uid": "0-0", "version": 0' in told[2]


def test_a_group_that_is_too_old_is_drawn_anew_or_kept(tmp_path, paces):
    for choice, version, drawn in (("drop", 3, 2), ("keep", 0, 1)):
        trainer = Trainer(tmp_path, max_staleness=1, stale_groups=choice)
        pace = paces(trainer)
        trainer.gates.close("score 0-0")
        for _ in range(3):
            learn(pace)
        trainer.gates.open("score 0-0")
        assert ("0-0", version) in learn(pace)
        assert uids(trainer).count("0-0") == drawn
        told = pace.metrics(DataProto.from_dict({"x": torch.zeros(1)}, {"version": object_array([4])}))
        assert told["queue/dropped"] == (choice == "drop") and told["queue/length"] == 0


def test_before_a_validation_servers_finish_and_begin_nothing(tmp_path, paces):
    trainer = Trainer(tmp_path, max_staleness=2, servers=2)
    pace = paces(trainer)
    trainer.gates.close("draw 1-0", "draw 1-1")
    learn(pace)
    trainer.gates.open("draw 1-0")
    trainer.gates.open("draw 1-1")
    pace.settle()
    pace.settle()
    before = list(trainer.drawn)
    settled_for_a_while()
    assert trainer.drawn == before
    learn(pace)
    until(lambda: len(trainer.drawn) == 8)


@pytest.mark.parametrize("what", ["draw 1-1", "score 1-1"])
def test_a_failure_ends_the_next_step_that_waits_for_it(tmp_path, paces, what):
    trainer = Trainer(tmp_path, max_staleness=1)
    trainer.fails[what] = ValueError(f"no {what}")
    trainer.gates.close(what)  # not before the first batch is there
    pace = paces(trainer)
    learn(pace)
    trainer.gates.open(what)
    with pytest.raises(ValueError, match=f"no {what}"):
        learn(pace)


def test_a_run_that_goes_on_trains_every_prompt_once(tmp_path, paces):
    """Stopped after two steps, with a group of the first step left behind and others on their way."""
    trainer = Trainer(tmp_path, max_staleness=2)
    pace = paces(trainer)
    trainer.gates.close("score 0-0")
    before = [learn(pace), learn(pace)]
    state = pace.data_state()
    assert state["groups"] == {"first": 0, "trained": [1, 2, 3, 4]}
    resumed = Trainer(tmp_path, max_staleness=2, state=state, done=2)
    other = paces(resumed)
    after = [learn(other), learn(other)]
    assert sorted(uid for step in before + after for uid, _ in step) == [f"{s}-{g}" for s in range(4) for g in range(B)]
    assert all(version >= 2 for step in after for _, version in step)
    prompts = [line.split('"prompt": ')[1:] for line in (tmp_path / "order.jsonl").read_text().splitlines()]
    assert sorted(int(one.split(",")[0]) for line in prompts for one in line) == list(range(8))


def test_in_order_the_state_is_that_of_any_mode(tmp_path, paces):
    pace = paces(Trainer(tmp_path, max_staleness=1))
    learn(pace)
    fresh = create_dataloader(Prompts(), B, shuffle=False, seed=0)
    next(iter(fresh))
    assert pace.data_state() == fresh.state_dict()


def test_groups_drawn_at_once_fill_a_forward(tmp_path, paces):
    for max_num_seqs, servers, at_once in ((N, 1, 1), (2 * N + 1, 1, 2), (100, 1, 2), (100, 2, 1), (1, 1, 1)):
        trainer = Trainer(tmp_path, max_staleness=1, servers=servers)
        trainer.run.config.actor_rollout_ref.rollout.max_num_seqs = max_num_seqs
        assert paces(trainer).queue.at_once == at_once


def test_a_failure_is_told_though_there_is_enough_to_learn_from(tmp_path, paces):
    """A dead server, or a reward that ends the run, must not wait for the day when a batch is missing."""
    trainer = Trainer(tmp_path, max_staleness=2)
    trainer.fails["score 2-1"] = ValueError("no score 2-1")
    trainer.gates.close("score 2-1")
    pace = paces(trainer)
    learn(pace)
    until(lambda: len(pace.queue.scored) == 3)  # of steps 1 and 2, all but the one that will fail
    trainer.gates.open("score 2-1")
    settled_for_a_while()
    with pytest.raises(ValueError, match="no score 2-1"):
        learn(pace)
