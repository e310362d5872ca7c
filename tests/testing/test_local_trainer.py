"""A run without Ray is on the device that its settings name."""

import os

import pytest
from omegaconf import OmegaConf

from verl_omni.testing import local_trainer


def test_verl_is_told_of_the_device_first(monkeypatch):
    """Where torch was built for CUDA and there is no GPU, verl takes CUDA's platform and looks for NCCL."""

    def stop(config):
        raise InterruptedError

    monkeypatch.setattr(local_trainer, "load_datasets", stop)
    monkeypatch.setenv("VERL_PLATFORM", "nvidia")
    with pytest.raises(InterruptedError):
        local_trainer.local_trainer(OmegaConf.create({"trainer": {"device": "cpu"}}))
    assert os.environ["VERL_PLATFORM"] == "cpu"
