"""Rollout servers that die while they draw: started again with their weights, and asked again."""

import asyncio
import gc
import os
import signal
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import requests
import torch
from omegaconf import OmegaConf
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError
from tiny_models import tiny_checkpoint

from verl_omni.agent_loop.routing import Block
from verl_omni.agent_loop.sample_engine import SampleEngine
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.report.timeline import Timeline
from verl_omni.trainer.diffusion.processes import load_models
from verl_omni.trainer.diffusion.rollouts import ServerRollouts, Weights
from verl_omni.utils import actors
from verl_omni.utils.background import start, wait_for
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.server import RolloutServer
from verl_omni.workers.transfer.weights import store_in_buckets

pytestmark = pytest.mark.timeout(300)


class Engine:
    """Answers with its weights and the seed, from blocks of two, once there is a file `go on` for that seed."""

    def __init__(self, folder):
        self.folder, self.weights, self.version, self.waiting = folder, None, None, []
        self.batcher = SimpleNamespace(waiting=0)

    def begin(self) -> None: ...

    def update_weights(self, weights, version, peft_config, base_sync_done):
        self.weights, self.version = dict(weights), version

    async def generate(self, *, sampling_params, priority=0, **_):
        if sampling_params.get("position") is not None and not priority:
            self.waiting.append(sampling_params["seed"])
            while len(self.waiting) < 2:
                await asyncio.sleep(0.01)
        (self.folder / f"asked {sampling_params['seed']}").touch()
        while not (self.folder / f"go on {sampling_params['seed']}").exists():
            await asyncio.sleep(0.01)
        pixels = torch.full((3, 1, 1), float(sampling_params["seed"]))
        return RolloutOutput(pixels, {"all_latents": self.weights["w"]}, version=self.version)


class Server(RolloutServer):
    def __init__(self, config, folder):
        super().__init__(config)
        self.folder = folder

    def load(self, device):
        return Engine(self.folder)

    async def pid(self):
        return os.getpid()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """It may die once."""
    monkeypatch.setattr(actors, "PAUSE_SECONDS", 0.05)
    config = OmegaConf.structured(DiffusionTrainerConfig)
    config.actor_rollout_ref.model.path = str(tiny_checkpoint())
    config.actor_rollout_ref.rollout.pipeline.negative_prompt = ""
    config.actor_rollout_ref.rollout.pipeline.max_sequence_length = 512
    ray.shutdown()  # one that another test left
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", runtime_env=paths)
    yield ray.remote(Server).options(max_restarts=1).remote(config, tmp_path)
    ray.shutdown()


def wait_until(found) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.01)


def version(address: str) -> int | None:
    return requests.get(f"{address}/health", timeout=60).json()["version"]


def answers_at(address: str) -> bool:
    try:
        return version(address) is not None
    except requests.ConnectionError:
        return False


def drawn_for_a_guest(address: str, folder: Path) -> int:
    """The version of the weights that drew an image, asked for over HTTP."""
    (folder / "go on 99").touch()
    answer = requests.post(f"{address}/v1/images/generations", json={"prompt": "a cat", "seed": 99}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["version"]


def ask(engine: SampleEngine, seed: int):
    return engine.generate.remote(sampling_params={"seed": seed}, request_id=str(seed))


def test_a_server_dies_in_a_rollout(server, tmp_path, capsys):
    """Of a block of two samples, one was answered before: the other is drawn again, with the same weights."""
    trained = SimpleNamespace(publish_weights=lambda policy, version: [store_in_buckets([("w", torch.ones(40_000))])])
    rollouts = ServerRollouts([server], trained, Timeline())
    rollouts.watch()
    rollouts.listen(0)
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Look at the policy")]
    address = said.removeprefix("Look at the policy while it trains: ")
    assert version(address) is None
    rollouts.begin("current", 7)
    assert drawn_for_a_guest(address, tmp_path) == 7
    rows = [{"position": (i, 2), "place": {"key": f"e/{i}", "ship": True}} for i in (0, 1)]
    engines = [SampleEngine([server], Block(0, 2), row) for row in rows]
    first, second = [start(ask(one, seed)) for seed, one in enumerate(engines)]
    wait_until(lambda: (tmp_path / "asked 1").exists())
    (tmp_path / "go on 0").touch()
    answers = [first.result(60)]
    os.kill(ray.get(server.pid.remote()), signal.SIGKILL)
    (tmp_path / "go on 1").touch()
    answers += [second.result(60)]
    assert [answer.response[0, 0, 0].item() for answer in answers] == [0, 1]
    assert [(answer.version, answer.reference.key) for answer in answers] == [(7, "e/0"), (7, "e/1")]
    # What it had answered outlives it.
    assert all(ray.get(answer.reference.stored)["all_latents"].sum() == 40_000 for answer in answers)
    assert rollouts.metrics() == {"rollout/server_restarts": 1}
    assert capsys.readouterr().out.count("rollout server 0 has died and is started again\n") == 1
    wait_until(lambda: answers_at(address))
    assert drawn_for_a_guest(address, tmp_path) == 7

    third = start(ask(engines[0], 2))
    wait_until(lambda: (tmp_path / "asked 2").exists())
    os.kill(ray.get(server.pid.remote()), signal.SIGKILL)
    with pytest.raises(ActorDiedError):
        third.result(60)
    rollouts.shutdown()


def test_a_server_that_cannot_start_is_told_before_training_has_loaded(server):
    """`server` for its Ray."""

    @ray.remote(num_cpus=0)
    def loads(seconds: float, error: Exception | None) -> None:
        time.sleep(seconds)
        if error is not None:
            raise error

    def load(training, *servers):
        workers = SimpleNamespace(execute_all_async=lambda method: [loads.remote(*training)])
        rollouts = SimpleNamespace(loading=lambda: [loads.remote(*one) for one in servers])
        load_models(workers, rollouts)

    with pytest.raises(RuntimeError, match="no room on this card"):
        load((1e6, None), (0, None), (0, RuntimeError("no room on this card")))
    load((0, None), (0, ActorUnavailableError("loads again", b"0" * 16)))
    with pytest.raises(ActorUnavailableError):
        load((0, ActorUnavailableError("a worker of the model", b"0" * 16)), (1e6, None))


def test_weights_stay_as_long_as_a_server_holds_them():
    """In Ray's object store, for the case that it dies; older ones are let go."""

    async def does(*arguments):
        return None

    server = SimpleNamespace(**{name: SimpleNamespace(remote=does) for name in ("start", "begin", "update_weights")})
    stored = [torch.ones(1), torch.ones(1)]
    first, second = map(weakref.ref, stored)
    trained = SimpleNamespace(publish_weights=lambda policy, version: [stored.pop(0)])
    rollouts = ServerRollouts([server, server], trained, Timeline())
    rollouts.begin("current", 0)
    rollouts.begin("current", 0)  # nothing new
    assert first() is not None
    rollouts.begin("current", 1)
    gc.collect()
    assert first() is None and second() is not None


def test_a_server_that_cannot_come_back_keeps_nobody_waiting(monkeypatch, capsys):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    deaths = iter([ActorUnavailableError("away", b"0" * 16), None])

    async def life():
        raise next(deaths)

    async def came_back():
        raise RuntimeError("CUDA out of memory\n")

    actor = SimpleNamespace(life=SimpleNamespace(remote=life))
    asyncio.run(asyncio.wait_for(actors.watch("rollout server 1", actor, came_back), 10))
    assert killed == [actor]
    assert capsys.readouterr().out.splitlines() == [
        "rollout server 1 has died and is started again",
        "rollout server 1 could not come back: CUDA out of memory",
    ]


def test_a_server_that_dies_while_it_loads_is_asked_again_and_gets_the_newest_weights():
    calls, dies = [], [True]

    def does(name):
        async def call(*arguments):
            calls.append((name, *arguments[1:]))
            if name == "start" and dies:
                dies.pop()
                raise ActorUnavailableError("away", b"0" * 16)

        return SimpleNamespace(remote=call)

    server = SimpleNamespace(**{name: does(name) for name in ("start", "begin", "update_weights")})
    rollouts = ServerRollouts([server], None, Timeline())
    newest = wait_for(rollouts.ready(0, lambda: Weights("current", len(calls), None)))
    assert calls == [("start",), ("begin",), ("update_weights", 2)] and newest.version == 2


def test_a_sample_that_is_asked_for_again_has_no_place_in_the_burst(monkeypatch):
    """Its first request may be under way, where only the connection was lost."""
    monkeypatch.setattr(actors, "PAUSE_SECONDS", 0)
    positions = []

    async def generate(*, sampling_params, request_id):
        positions.append(sampling_params.get("position"))
        if len(positions) < 3:
            raise ActorUnavailableError("away", b"0" * 16)
        return RolloutOutput("text")

    async def withdraw(position):
        raise ActorUnavailableError("away", b"0" * 16)

    server = SimpleNamespace(**{f.__name__: SimpleNamespace(remote=f) for f in (generate, withdraw)})
    engine = SampleEngine([server], Block(0, 2), {"position": (0, 2)})
    asyncio.run(ask(engine, 1))
    assert positions == [(0, 2), None, None]


def test_a_server_that_cannot_listen_again_still_draws(capsys):
    said = []

    def does(name, error=None):
        async def call(*arguments):
            said.append(name)
            if error is not None and said.count(name) > 1:
                raise error
            return "http://127.0.0.1:8200"

        return SimpleNamespace(remote=call)

    gone = RayTaskError("listen", "Traceback", ValueError("the token file cannot be read")).as_instanceof_cause()
    names = ("start", "begin", "update_weights")
    server = SimpleNamespace(**{name: does(name) for name in names}, listen=does("listen", gone))
    trained = SimpleNamespace(publish_weights=lambda policy, version: ["stored"])
    rollouts = ServerRollouts([server], trained, Timeline())
    rollouts.listen(8200)
    rollouts.begin("current", 0)
    wait_for(rollouts._came_back(0))
    assert said[-3:] == ["start", "update_weights", "listen"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "rollout server 0 no longer answers over HTTP: the token file cannot be read"
