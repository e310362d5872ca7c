"""The environment: the versions that were tried, and the CPU as a platform of both."""

from importlib.metadata import version

import pytest

from verl_omni.pipelines.vllm_omni import installed

TRIED = ("0.26.0", "0.28.0")


def test_vllm_omni_computes_on_the_cpu():
    if not installed():
        pytest.skip("vllm-omni is not installed here, and its tests are left out: type make test-vllm-omni")
    from vllm.platforms import current_platform
    from vllm_omni.platforms import current_omni_platform

    assert version("vllm") == version("vllm-omni") and version("vllm") in TRIED
    assert current_platform.is_cpu() and type(current_omni_platform).__module__.startswith("verl_omni.")
    assert current_omni_platform.get_torch_device().type == "cpu"
    free, total = current_omni_platform.get_device_memory()
    assert 0 < free < total
