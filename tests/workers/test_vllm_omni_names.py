"""The names of the vLLM-Omni rollout that documents give: there without vllm, and clear about what they cannot do."""

import asyncio
import inspect
import subprocess
import sys
from types import SimpleNamespace

import pytest
from tiny_models import tiny_checkpoint
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, get_rollout_replica_class

from verl_omni.config import DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.pipelines.vllm_omni import installed
from verl_omni.workers.rollout import vllm_rollout
from verl_omni.workers.rollout.vllm_rollout import vLLMOmniHttpServer, vLLMOmniReplica


def test_the_package_costs_nothing_and_its_names_need_no_vllm():
    code = """
import sys, verl_omni.workers.rollout.vllm_rollout as package
print(*[name for name in ("torch", "ray", "verl", "vllm") if name in sys.modules])
package.vLLMOmniHttpServer, package.vLLMOmniReplica
print(*[name for name in ("vllm", "vllm_omni") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["", ""]
    with pytest.raises(AttributeError, match="no attribute 'vLLMReplica'"):
        vllm_rollout.vLLMReplica  # noqa: B018


def test_they_are_what_verl_looks_for():
    assert issubclass(vLLMOmniReplica, RolloutReplica) and get_rollout_replica_class("vllm_omni") is vLLMOmniReplica
    parameters = list(inspect.signature(vLLMOmniHttpServer).parameters)
    assert parameters == [
        "config", "model_config", "rollout_mode", "workers", "replica_rank", "node_rank", "gpus_per_node", "nnodes",
        "cuda_visible_devices",
    ]  # fmt: skip


def test_a_replica_without_a_training_process_is_one_line():
    replica = vLLMOmniReplica(1, DiffusionRolloutConfig(), DiffusionModelConfig(path=str(tiny_checkpoint())))
    one = SimpleNamespace(workers=["a worker"])
    with pytest.raises(ValueError, match="^replica 1 has no training process of its own: there are 1,"):
        asyncio.run(replica.init_hybrid(one))


def server(**over) -> vLLMOmniHttpServer:
    asked = {"rollout_mode": RolloutMode.STANDALONE, "workers": [], "replica_rank": 0, "node_rank": 0}
    asked |= {"gpus_per_node": 1, "nnodes": 1, "cuda_visible_devices": ""} | over
    return vLLMOmniHttpServer(DiffusionRolloutConfig(), DiffusionModelConfig(path=str(tiny_checkpoint())), **asked)


@pytest.mark.parametrize("over", [{"nnodes": 2}, {"gpus_per_node": 8}])
def test_several_devices_are_several_replicas(over):
    with pytest.raises(ValueError, match="one device on one node, .* start a replica for each device"):
        server(**over)


@pytest.mark.skipif(installed(), reason="vllm-omni is installed here")
def test_without_vllm_a_server_says_what_to_type():
    with pytest.raises(ValueError, match="vllm-omni is not installed here: type "):
        server()
