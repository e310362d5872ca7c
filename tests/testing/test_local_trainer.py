"""A run without Ray is on the device that its settings name."""

import os
import sys
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl_omni.testing import local_trainer
from verl_omni.trainer import progress
from verl_omni.workers.layout import Layout


def test_verl_is_told_of_the_device_first(monkeypatch):
    """Where torch was built for CUDA and there is no GPU, verl takes CUDA's platform and looks for NCCL."""

    def stop(config):
        raise InterruptedError

    monkeypatch.setattr(local_trainer, "load_datasets", stop)
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    with pytest.raises(InterruptedError):
        local_trainer.local_trainer(OmegaConf.create({"trainer": {"device": "cpu"}}))
    assert os.environ["VERL_PLATFORM"] == "cpu"


def test_it_says_how_long_the_compiler_took(monkeypatch, capsys):
    """As a run does that is waited for: the line of the first images."""
    rollouts = local_trainer._LocalRollouts(SimpleNamespace(workers=[None]), Layout())
    monkeypatch.setattr(local_trainer.clock, "_seconds", 61.04)
    progress.say_what_is_waited_for(lambda: sys.stdout)
    progress.first_images(rollouts.compiling_seconds)
    assert "the first images are there; 61.0 s of this went into compiling" in capsys.readouterr().out
