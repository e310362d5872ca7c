"""A standalone replica as verl starts one: its server draws for who has its handle, and over HTTP."""

import asyncio
import base64
import io
import os
import sys

import diffusers
import numpy as np
import openai
import pytest
import ray
import torch
from PIL import Image
from tiny_models import tiny_checkpoint

from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionRolloutConfig
from verl_omni.pipelines.qwen_image import QwenImage
from verl_omni.utils.errors import RequestAborted
from verl_omni.workers.rollout.vllm_rollout import vLLMOmniReplica
from verl_omni.workers.transfer.weights import store_in_buckets

pytestmark = pytest.mark.timeout(600)
PROMPT, SEED = "a cat on a wall", 5
SIZE = {"height": 32, "width": 48, "num_inference_steps": 3, "true_cfg_scale": 4.0}


def model() -> DiffusionModelConfig:
    return DiffusionModelConfig(path=str(tiny_checkpoint()))


@pytest.fixture(scope="module")
def replica():
    ray.shutdown()  # one that another test left
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", runtime_env=paths)
    started = vLLMOmniReplica(
        0, DiffusionRolloutConfig(name="vllm_omni", pipeline=DiffusionPipelineConfig(**SIZE)), model()
    )
    asyncio.run(started.init_standalone())
    yield started
    ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """What diffusers' own pipeline draws."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_checkpoint())
    pipe.set_progress_bar_config(disable=True)
    (image,) = pipe(PROMPT, negative_prompt=" ", generator=torch.Generator().manual_seed(SEED), **SIZE).images
    return np.asarray(image).astype(int)


def drawn(replica: vLLMOmniReplica, **params) -> tuple[np.ndarray, int]:
    tokenizers = QwenImage.load_tokenizers(model())
    output = ray.get(
        replica._server_handle.generate.remote(
            prompt_ids=QwenImage.tokenize(tokenizers, PROMPT, 512),
            sampling_params={"noise_level": 0.0} | params,
            request_id="one",
            negative_prompt_ids=QwenImage.tokenize(tokenizers, " ", 512),
        ),
        timeout=120,
    )
    return output.image.permute(1, 2, 0).numpy().astype(int), output.version


def over_http(replica: vLLMOmniReplica) -> tuple[np.ndarray, int]:
    client = openai.OpenAI(base_url=f"http://{replica.server_address}/v1", api_key="none", max_retries=0)
    answer = client.images.generate(prompt=PROMPT, extra_body={"seed": SEED})
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))).astype(int), answer.version


def test_a_handle_and_http_draw_what_diffusers_draws(replica, expected):
    for image, version in (drawn(replica, seed=SEED), over_http(replica)):
        assert version == 0 and image.shape == expected.shape and np.abs(image - expected).max() <= 1


def test_without_a_seed_every_answer_is_another(replica):
    (one, _), (other, _) = drawn(replica), drawn(replica)
    assert np.abs(one - other).max() > 1


def test_requests_wait_for_a_server_that_sleeps(replica, expected):
    asyncio.run(replica.sleep())
    tokens = QwenImage.tokenize(QwenImage.load_tokenizers(model()), PROMPT, 512)
    waits = replica._server_handle.generate.remote(tokens, {"seed": SEED, "true_cfg_scale": 1.0}, "two")
    assert ray.wait([waits], timeout=2) == ([], [waits])
    asyncio.run(replica.wake_up())
    assert ray.get(waits, timeout=120).image.shape == (3, 32, 48)


def long_request(replica: vLLMOmniReplica, name: str) -> ray.ObjectRef:
    """Of so many steps that a test would end before it."""
    tokens = QwenImage.tokenize(QwenImage.load_tokenizers(model()), PROMPT, 512)
    params = {"seed": SEED, "true_cfg_scale": 1.0, "num_inference_steps": 50_000, "noise_level": 0.0}
    return replica._server_handle.generate.remote(tokens, params, name)


def test_a_request_that_is_aborted_returns_and_its_forward_ends(replica, expected):
    drawing = long_request(replica, "long")
    assert ray.wait([drawing], timeout=2) == ([], [drawing])
    aborted = ray.get(replica._server_handle.abort_request.remote("long"))
    assert aborted == {"aborted": True, "request_id": "long"}
    with pytest.raises(RequestAborted, match="request long was aborted"):
        ray.get(drawing, timeout=10)
    assert not ray.get(replica._server_handle.abort_request.remote("long"))["aborted"]
    image, _ = drawn(replica, seed=SEED)
    assert np.abs(image - expected).max() <= 1


@pytest.mark.parametrize("reject", [False, True])
def test_all_requests_are_aborted_and_others_wait_or_are_refused(replica, expected, reject):
    running, waiting = (long_request(replica, name) for name in ("running", "waiting"))
    assert ray.wait([running, waiting], timeout=2)[0] == []
    asyncio.run(replica.abort_all_requests(reject_request=reject))
    for one in (running, waiting):
        with pytest.raises(RequestAborted):
            ray.get(one, timeout=10)
    late = replica._server_handle.generate.remote([1, 2], {"true_cfg_scale": 1.0}, "late")
    if reject:
        with pytest.raises(RequestAborted, match="takes no others for now"):
            ray.get(late, timeout=10)
    else:
        asyncio.run(replica.sleep())
        asyncio.run(replica.wake_up())
        assert ray.wait([late], timeout=1)[0] == [], "it sleeps no more, but was not told to go on"
    asyncio.run(replica.resume_generation())
    image, _ = drawn(replica, seed=SEED)
    assert np.abs(image - expected).max() <= 1


def test_new_weights_draw_another_image(replica, expected):
    """Last: they stay."""
    module = QwenImage.load_module(model(), torch.float32)
    stored = store_in_buckets((name, 1.05 * p.detach()) for name, p in module.named_parameters())
    ray.get(replica._server_handle.update_weights.remote(stored, 3))
    for image, version in (drawn(replica, seed=SEED), over_http(replica)):
        assert version == 3 and np.abs(image - expected).max() > 1
