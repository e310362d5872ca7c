"""The environment: the version that was tried."""

from importlib.metadata import version

import pytest

from verl_omni.workers.engine.veomni.veomni_impl import installed

TRIED = ("0.1.12",)


def test_veomni_is_the_version_that_was_tried():
    if not installed():
        pytest.skip("veomni is not installed here, and its tests are left out: type make test-veomni")
    assert version("veomni") in TRIED
