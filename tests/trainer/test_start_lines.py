"""From the command to the first image the screen says what it waits for, with seconds."""

import re
import sys

import pytest

from verl_omni.trainer import progress


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(progress, "progress", progress.Progress())
    monkeypatch.setattr(progress, "_began", None)
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


def test_nothing_where_nobody_asked_for_it(capsys):
    progress.tell(stage="start of Ray")
    assert not capsys.readouterr().err
