"""From the command to the first image the screen says what it waits for, with seconds."""

import re
import sys

import pytest
from refusals import prepared

from verl_omni.trainer import progress, runner
from verl_omni.trainer.runner import compiles
from verl_omni.utils.errors import RunError


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(progress, "progress", progress.Progress())
    monkeypatch.setattr(progress, "_began", None)
    monkeypatch.setattr(progress, "_draws", False)
    monkeypatch.setattr(progress, "WAITED_FOR", dict(progress.WAITED_FOR))


def test_every_stage_once_up_to_the_first_image(capsys):
    progress.say_what_is_waited_for(lambda: sys.stderr)
    progress.name_stage("loading of the model", "loading the model (41.0 GB)")
    progress.tell(stage="start of Ray")
    for _ in range(2):  # a cluster's driver hands the same report on every second
        progress.tell(stage="loading of the model")
    with progress.timer({}, "testing"), progress.timer({}, "gen"):
        pass
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^ *\d+\.\d s  ", "", line) for line in lines] == [
        "starting Ray",
        "loading the model (41.0 GB)",
        "drawing the first images, for validation",
    ]


def test_compiling_has_seconds_of_its_own_once(capsys):
    progress.say_what_is_waited_for(lambda: sys.stderr)
    progress.tell(stage="rollout")
    for _ in range(2):
        progress.first_images(lambda: 61.04)
    *_, said = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r" *\d+\.\d s  the first images are there; 61.0 s of this went into compiling", said)
    progress.tell(stage="validation")
    assert not capsys.readouterr().err


def test_nothing_of_compiling_where_nothing_was_compiled(capsys):
    progress.say_what_is_waited_for(lambda: sys.stderr)
    progress.tell(stage="validation")
    progress.first_images(lambda: 0.0)
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    "more, waits",
    [
        (["use_torch_compile=true"], True),
        (["use_torch_compile=true", "compile_ahead=true"], True),
        ([], False),  # on a CPU
    ],
)
def test_what_compiles_is_said(more, waits):
    engine = [f"actor_rollout_ref.actor.engine.{one}" for one in more]
    assert compiles(prepared("trainer.device=cpu", *engine)) is waits


def test_ranks_that_share_samples_and_language_models_do_not_compile():
    shared = ["trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2"]
    config = prepared("trainer.device=cpu", *shared)
    config.trainer.device = "cuda"  # where blocks are compiled without being asked
    assert not compiles(config)
    config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size = 1
    assert compiles(config)
    config.actor_rollout_ref.model.path = None
    assert not compiles(config)


def test_the_line_of_the_first_images_names_the_compiler(tmp_path, monkeypatch, capsys):
    """As the run says it, up to where Ray would start."""

    def enough(*_):
        raise RunError("enough")

    monkeypatch.setattr("verl_omni.trainer.resources.start_ray", enough)
    compiled = "actor_rollout_ref.actor.engine.use_torch_compile=true"
    folder = f"trainer.default_local_dir={tmp_path}"
    progress.say_what_is_waited_for(lambda: sys.stderr)
    with pytest.raises(RunError, match="enough"):
        runner._run_on_ray(prepared("trainer.device=cpu", compiled, folder), None, quiet=False)
    monkeypatch.setattr(progress.progress, "run_dir", None)
    progress.tell(stage="rollout")
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r" *\d+\.\d s  compiling the model's blocks and drawing the first images", said)


def test_nothing_where_nobody_asked_for_it(capsys):
    progress.tell(stage="start of Ray")
    assert not capsys.readouterr().err
