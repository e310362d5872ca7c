"""These tests need the environment of `make vllm-omni`. A process has one engine of vLLM-Omni at a time."""

import pytest
import torch.distributed as dist

from verl_omni.pipelines.vllm_omni import installed

NAMES = (
    "QwenImagePipeline", "QwenImageEditPlusPipeline", "StableDiffusion3Pipeline", "FluxPipeline", "Flux2Pipeline",
    "Flux2KleinPipeline", "ZImagePipeline", "WanPipeline", "WanPipeline-2.2",
    "WanImageToVideoPipeline", "WanImageToVideoPipeline-2.2", "WanImageToVideoPipeline-TI2V",
    "GlmImagePipeline", "LTX2Pipeline",
)  # fmt: skip

if not installed():  # test_installed.py says so
    collect_ignore_glob = ["test_[!i]*.py"]
else:
    from test_architectures import mended_upstream, small_references  # noqa: F401  (for every test here)


@pytest.fixture(scope="module", params=NAMES)
def served(request):
    """An architecture of the table, and the vLLM-Omni engine on its tiny checkpoint, with guidance and noise."""
    from test_architectures import TABLE, config
    from vllm_cases import vllm_rollout

    row = next(row for row in TABLE if row.name == request.param)
    engine = vllm_rollout(config(row, cfg=True, noise=0.7))
    yield row, engine
    engine.stop()
    assert not dist.is_initialized()
