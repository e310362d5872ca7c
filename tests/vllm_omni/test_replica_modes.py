"""Replicas on the device of training, as verl starts them: in processes of their own, with weights by ipc."""

import asyncio
import os
import sys

import pytest
import ray
import torch
from e2e_runs import settings
from test_http_server import PROMPT, SEED, SIZE
from tiny_models import tiny_checkpoint
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from verl_omni.pipelines.qwen_image import QwenImage
from verl_omni.testing.local_trainer import local_config
from verl_omni.trainer.diffusion.rollouts import by_checkpoint_engine
from verl_omni.workers.diffusion_worker import DiffusionWorker
from verl_omni.workers.rollout.vllm_rollout import vLLMOmniReplica

pytestmark = pytest.mark.timeout(600)
A = "actor_rollout_ref."


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    size = [f"{A}rollout.pipeline.{name}={value}" for name, value in SIZE.items()]
    by_ipc = [f"{A}rollout.name=vllm_omni", f"{A}hybrid_engine=false", f"{A}rollout.checkpoint_engine.backend=ipc"]
    return local_config(settings(tmp_path_factory.mktemp("run"), *size, *by_ipc, model=tiny_checkpoint()))


@pytest.fixture(scope="module")
def pool():
    """It has all CPUs that Ray has: nobody is beside it who has not asked for a place in it."""
    ray.shutdown()  # one that another test left
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}}
    ray.init(address="local", num_cpus=3, include_dashboard=False, logging_level="ERROR", runtime_env=paths)
    yield RayResourcePool([1], use_gpu=False, max_colocate_count=3)
    ray.shutdown()


@pytest.fixture(scope="module")
def training(pool, config):
    group = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(DiffusionWorker), config=config), device_name="cpu")
    group.init_model()
    return group


def drawn(replica: vLLMOmniReplica, config) -> tuple[torch.Tensor, int]:
    tokenizers = QwenImage.load_tokenizers(config.actor_rollout_ref.model)
    ids, negative = (QwenImage.tokenize(tokenizers, text, 512) for text in (PROMPT, " "))
    output = ray.get(
        replica.server_handle.generate.remote(
            ids, {"seed": SEED, "noise_level": 0.0}, "one", negative_prompt_ids=negative
        )
    )
    return output.image.int(), output.version


@pytest.mark.parametrize("mode", ["hybrid", "colocated"])
def test_a_replica_beside_training_draws_with_its_weights(mode, pool, training, config):
    arr = config.actor_rollout_ref
    replica = vLLMOmniReplica(0, arr.rollout, arr.model)
    asyncio.run(replica.init_hybrid(training) if mode == "hybrid" else replica.init_colocated(pool))
    first, version = drawn(replica, config)
    assert version == 0
    send = by_checkpoint_engine(config, training.workers, [replica.server_handle])

    ray.get(training.workers[0].__ray_call__.remote(lambda self: scale(self.engine.module, 1.05)))
    ray.get(replica.server_handle.update_weights.remote(send("current", 4), 4))
    moved, version = drawn(replica, config)
    assert version == 4 and (moved - first).abs().max() > 1

    ray.get(training.workers[0].__ray_call__.remote(lambda self: scale(self.engine.module, 1 / 1.05)))
    asyncio.run(replica.sleep())
    ray.get(replica.server_handle.update_weights.remote(send("current", 5), 5))
    asyncio.run(replica.wake_up())
    again, version = drawn(replica, config)
    assert version == 5 and (again - first).abs().max() <= 1
    ray.kill(replica.server_handle)


@torch.no_grad()
def scale(module: torch.nn.Module, factor: float) -> None:
    for parameter in module.parameters():
        parameter.mul_(factor)
