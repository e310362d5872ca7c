"""`verl_omni.train`: how arguments become settings of the command, and how a run calls a function of this process."""

import math
import multiprocessing
import os
import subprocess
import sys

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from verl.protocol import DataProto

import verl_omni
from verl_omni.api import reward_at_home, training
from verl_omni.api.callbacks_at_home import AT_HOME, Told
from verl_omni.api.home import Home, call_home, known
from verl_omni.trainer import callbacks
from verl_omni.trainer.callbacks import UsersCallbacks
from verl_omni.trainer.progress import Stages
from verl_omni.utils.errors import RunError


class Misspelt(verl_omni.Callback):
    def on_step_ended(self, run, step): ...


@pytest.fixture
def started(monkeypatch) -> list:
    """The commands that would have been run."""
    commands = []
    monkeypatch.setattr(training, "_run", lambda command, environment, *rest: commands.append((command, environment)))
    return commands


def settings(command: list[str]) -> dict:
    """As the command's own parser reads them."""
    words = [word for word in command[3:] if "=" in word]
    return {one.key_or_group: one.value() for one in OverridesParser.create().parse_overrides(words)}


def test_arguments_are_the_commands_settings(started, tmp_path):
    verl_omni.train(
        "some/model",
        ['say "hi", {x}', {"prompt": "b", "ground_truth": "7"}],
        "ocr",
        recipe="qwen_image_ocr",
        folder=tmp_path / "run",
        settings={"trainer.save_freq": 5, "reward": {"scorers": None}},
        actor_rollout_ref={"rollout": {"n": 4}, "model": {"target_modules": ["to_q", "to_k"]}},
        trainer={"logger": ["console"], "val_before_train": False},
    )
    ((command, _),) = started
    assert command[3] == "qwen_image_ocr"
    found = settings(command)
    rows = (tmp_path / "run.prompts.jsonl").read_text().splitlines()
    assert rows == ['{"prompt": "say \\"hi\\", {x}"}', '{"prompt": "b", "ground_truth": "7"}']
    assert found == {
        "trainer.save_freq": 5,
        "reward.scorers": [{"name": "ocr", "weight": 1}],
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.model.target_modules": ["to_q", "to_k"],
        "trainer.logger": ["console"],
        "trainer.val_before_train": False,
        "trainer.default_local_dir": str(tmp_path / "run"),
        "actor_rollout_ref.model.path": "some/model",
        "data.train_files": str(tmp_path / "run.prompts.jsonl"),
    }


def test_a_reward_of_this_process_is_asked_for_from_another_one(started, tmp_path):
    told = []

    def reward(image, prompt, ground_truth=None):
        told.append((image.size, prompt, os.getpid()))
        if prompt == "bad":
            raise ZeroDivisionError("no")
        return {"score": 0.5, "length": len(prompt)}

    # A process that shares nothing with this one but its environment, as Ray's.
    code = """
import torch
from verl_omni.api.reward_at_home import one
told = dict(solution_image=torch.full((3, 4, 6), 0.5), data_source="x", ground_truth=None, extra_info={}, code="")
print(one(prompt="a cat", **told))
try:
    one(prompt="bad", **told)
except ZeroDivisionError as error:
    print(error)
"""
    with Home({"reward": training.at_home(reward)}) as home:
        asked = [sys.executable, "-c", code]
        done = subprocess.run(asked, env=os.environ | home.environment, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["{'score': 0.5, 'length': 5}", "no"], done.stderr
    assert told[0] == ((6, 4), "a cat", os.getpid())


def test_many_images_at_once_a_coroutine_and_an_exception_of_ones_own():
    class Odd(Exception):
        pass

    async def reward(images, prompts):
        if len(images) > 2:
            raise Odd("three")
        return [len(prompt) for prompt in prompts]

    image = torch.zeros(3, 2, 2)
    with Home({"reward": training.at_home(reward)}) as home, pytest.MonkeyPatch.context() as patch:
        for name, value in home.environment.items():
            patch.setenv(name, value)
        named = {"data_sources": [], "ground_truths": [], "extra_infos": [], "code": ""}
        assert reward_at_home.many([image] * 2, prompts=["a", "bc"], **named) == [1, 2]
        with pytest.raises(RuntimeError, match="three") as raised:
            reward_at_home.many([image] * 3, prompts=["a"] * 3, **named)
        assert type(raised.value).__name__ == "Odd"
        patch.setenv("VERL_OMNI_HOME_KEY", "00" * 32)
        with pytest.raises(multiprocessing.AuthenticationError):
            call_home("reward", {})


def test_a_function_says_what_it_was_written_as(started, tmp_path):
    for reward in (lambda image: 1.0, lambda image: 2.0, lambda images: [1.0]):
        verl_omni.train("m", "prompts.txt", reward, folder=tmp_path / "run")
    first, second, third = (settings(command) for command, _ in started)
    code = "reward.custom_reward_function.reward_kwargs"
    assert first[code] != second[code], "going on with another reward is told, and refused"
    names = [found["reward.custom_reward_function.name"] for found in (first, second, third)]
    assert names == ["one", "one", "many"] and "VERL_OMNI_HOME" in started[0][1]


def test_what_cannot_work_is_refused_before_anything_starts(started, tmp_path):
    with pytest.raises(ValueError, match="parameter 'picture'|picture"):
        verl_omni.train("m", "prompts.txt", lambda picture: 1.0, folder=tmp_path)
    elsewhere = {"folder": tmp_path, "ray": {"address": "auto"}}
    with pytest.raises(ValueError, match="a reward of this process is not to be reached from the other machines"):
        verl_omni.train("m", "prompts.txt", lambda image: 1.0, **elsewhere)
    with pytest.raises(ValueError, match=r'a callback of this .* trainer={"callbacks": \["mine.py:Watch"\]}'):
        verl_omni.train("m", "prompts.txt", callbacks=[verl_omni.Callback()], **elsewhere)
    with pytest.raises(ValueError, match="is no object of a subclass of verl_omni.Callback"):
        verl_omni.train("m", "prompts.txt", callbacks=[verl_omni.Callback], folder=tmp_path)
    with pytest.raises(ValueError, match='Misspelt would never be called.*"on_step_end"'):
        verl_omni.train("m", "prompts.txt", callbacks=[Misspelt()], folder=tmp_path)
    assert not started


def test_the_commands_last_line_is_the_error(tmp_path):
    with pytest.raises(RunError, match="^trainer.sav_freq: there is no such|sav_freq"):
        verl_omni.train("m", "prompts.txt", "ocr", folder=tmp_path / "run", trainer={"sav_freq": 1})


# What a run does with its folder, by the same parts: it notes its start, opens the metrics, and is saved at Ctrl-C.
RUN = """
import signal, sys, time
from pathlib import Path
from verl_omni.report.starts import note_start
from verl_omni.report.tracking import JsonLines

folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
folder.mkdir(exist_ok=True)

def stop(*_):
    (folder / "saved").write_text(str(step))
    print("stopped by Ctrl-C", flush=True)
    sys.exit(130)

step = first
signal.signal(signal.SIGINT, stop)
print("checking", flush=True)
note_start(folder, first, None)
metrics = JsonLines(folder / "metrics.jsonl", first or None)
print("drawing", flush=True)
for step in range(first + 1, last + 1):
    metrics.log({"made_by": first}, step)
    print("step", step, flush=True)
    time.sleep(float(sys.argv[4]))
"""


def child(folder, first: int, last: int, on_step, seconds: float = 0) -> None:
    command = [sys.executable, "-c", RUN, str(folder), str(first), str(last), str(seconds)]
    training._run(command, dict(os.environ), folder, on_step)


def test_every_step_is_told_once_and_those_made_again_too(tmp_path, capfd):
    """A run that goes on from step 2 makes steps 3 and 4 anew, of which there are lines of the run before."""
    told = []

    def on_step(metrics):
        told.append((metrics["step"], metrics["made_by"]))

    child(tmp_path / "run", 0, 4, on_step)
    assert told == [(step, 0) for step in (1, 2, 3, 4)]
    told.clear()
    child(tmp_path / "run", 2, 6, on_step)
    assert told == [(step, 2) for step in (3, 4, 5, 6)]
    assert "step 6" in capfd.readouterr().out


def test_a_function_that_raises_ends_the_run_and_is_heard(tmp_path):
    def on_step(metrics):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="^mine$"):
        child(tmp_path / "run", 0, 1000, on_step, seconds=0.1)
    assert (tmp_path / "run/saved").read_text() in [str(step) for step in range(1, 1000)]


def test_a_function_that_says_false_ends_the_run(tmp_path):
    child(tmp_path / "run", 0, 1000, lambda metrics: metrics["step"] < 3, seconds=0.1)
    assert 3 <= int((tmp_path / "run/saved").read_text()) < 1000


def test_steps_are_told_from_a_file_that_has_to_be_there(started, tmp_path):
    with pytest.raises(ValueError, match="trainer.logger=.'console'. has no jsonl: add it"):
        verl_omni.train("m", "p.txt", "ocr", folder=tmp_path, on_step=print, trainer={"logger": ["console"]})
    assert not started


@pytest.mark.parametrize("value", [
    "a\\b", "\\d+\\.\\w", 'say \\"hi\\\\"', "ends\\", "\\\\", '"', "C:\\new, {x}: [1]", "",
    math.inf, -math.inf, 1e-05, True, {"pattern": "\\d", "most": math.inf}, ["\\", 0.1],
])  # fmt: skip
def test_a_value_arrives_as_it_is(started, tmp_path, value):
    name = "reward.custom_reward_function.reward_kwargs"
    verl_omni.train("m", "p.txt", "ocr", folder=tmp_path, settings={name: value})
    ((command, _),) = started
    found = settings(command)[name]
    assert found == value and type(found) is type(value)


class Notes(verl_omni.Callback):
    """What it is told, in this process."""

    def __init__(self, stop_at: int):
        self.told, self.stop_at = [], stop_at

    def on_run_start(self, run):
        self.told.append(("start", run.config.trainer.seed, run.total_steps, run.folder.name, os.getpid()))

    def on_step_end(self, run, step):
        step.metrics["mine/rows"] = len(step.batch)
        self.told.append(("step", run.step, step.number, step.last, step.timing))
        if run.step == self.stop_at:
            run.stop()

    def on_validation(self, run, metrics):
        self.told.append(("validation", metrics))

    def on_checkpoint(self, run, folder):
        raise KeyError(folder.name)

    def on_run_end(self, run, error):
        self.told.append(("end", error and (type(error), str(error))))


def test_callbacks_are_objects_of_this_process(monkeypatch, tmp_path):
    """As `trainer.callbacks` has them called by the run's driver."""
    rows = DataProto.from_dict({"sample_level_rewards": torch.tensor([[1.0], [3.0]])})
    notes = Notes(stop_at=2)
    with Home({"callbacks": Told([notes])}) as home:
        for name, value in home.environment.items():
            monkeypatch.setenv(name, value)
        driver = UsersCallbacks([AT_HOME])
        run = callbacks.Run(OmegaConf.create({"trainer": {"seed": 7}}), tmp_path / "run", total_steps=3)
        driver.on_run_start(run)
        stopped = []
        monkeypatch.setattr(callbacks, "request_stop", lambda: stopped.append(run.step))
        for run.step in (1, 2):
            step = callbacks.Step(run.step, {"critic/rewards/mean": 2.0}, rows, Stages(), last=False)
            driver.on_step_end(run, step)
            assert step.metrics == {"critic/rewards/mean": 2.0, "mine/rows": 2}
        driver.on_validation(run, {"val-core/x": 1.0})
        failed = "^trainer.callbacks: Notes failed in on_checkpoint: KeyError: 'global_step_2'$"
        with pytest.raises(RunError, match=failed):
            driver.on_checkpoint(run, tmp_path / "global_step_2")
        driver.on_run_end(run, ValueError("no"))
    assert stopped[0] == 2, "asked for in this process, heard by the driver"
    assert notes.told == [
        ("start", 7, 3, "run", os.getpid()),
        ("step", 1, 1, False, {}),
        ("step", 2, 2, False, {}),
        ("validation", {"val-core/x": 1.0}),
        ("end", (ValueError, "no")),
    ]


def test_callbacks_come_after_those_of_the_settings(started, tmp_path):
    verl_omni.train("m", "p.txt", "ocr", folder=tmp_path, callbacks=[Notes(1)], trainer={"callbacks": ["a.py:A"]})
    ((command, environment),) = started
    assert settings(command)["trainer.callbacks"] == ["a.py:A", AT_HOME] and "VERL_OMNI_HOME" in environment


def test_callbacks_come_after_those_of_the_recipe(started, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("defaults: [qwen_image_ocr, _self_]\ntrainer: {callbacks: ['a.py:A']}\n")
    given = {"folder": tmp_path / "run", "callbacks": [Notes(1)]}
    verl_omni.train("m", "p.txt", "ocr", recipe=str(recipe), **given)
    verl_omni.train("m", "p.txt", "ocr", recipe=str(recipe), **given, trainer={"callbacks": ["b.py:B"]})
    found = [settings(command)["trainer.callbacks"] for command, _ in started]
    assert found == [["a.py:A", AT_HOME], ["b.py:B", AT_HOME]]  # a setting takes the place of the recipe's


@pytest.mark.parametrize("kind", [UnicodeDecodeError, UnicodeEncodeError, KeyError])
def test_any_error_can_be_told_by_its_name(kind):
    """Some are not made of a text alone."""
    error = known(kind.__name__)("what went wrong")
    assert type(error).__name__ == kind.__name__ and error.args == ("what went wrong",)
