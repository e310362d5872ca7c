"""A `ray.address` where no Ray answers is said in one line, in time."""

import socket
import time

import pytest
from composed import composed

from verl_omni.trainer.resources import check_answers
from verl_omni.trainer.runner import run_diffusion


def test_a_ray_that_is_not_there_is_said_at_once():
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"ray.address=127.0.0.1:9 does not answer \(.*refused\): start Ray there"):
        check_answers("127.0.0.1:9")
    with pytest.raises(ValueError, match=r"ray.address=nonsense does not answer"):
        check_answers("nonsense")
    assert time.monotonic() - began < 30


def test_a_run_asks_before_anything_else():
    with pytest.raises(ValueError, match="ray.address=127.0.0.1:9 does not answer"):
        run_diffusion(composed("ray.address=127.0.0.1:9"))  # and without a model


def test_a_port_that_is_no_ray_is_said_in_time():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ValueError, match=f"ray.address={address} does not answer"):
            check_answers(address, seconds=4)
        assert time.monotonic() - began < 30
