"""Which adapter an (architecture, algorithm) pair gets, whoever registered first."""

import subprocess
import sys
import textwrap

import pytest
import torch

from verl_omni.algorithms import get_algorithm, registry
from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig
from verl_omni.pipelines.adapter_registry import AdapterRegistry
from verl_omni.pipelines.model_base import DiffusionModelBase, VllmOmniPipelineBase


@pytest.fixture
def adapters(monkeypatch) -> AdapterRegistry:
    """A registry of the test's own; names of algorithms are forgotten afterwards."""
    monkeypatch.setattr(registry, "_ADAPTED", set(registry._ADAPTED))
    return AdapterRegistry("model")


def adapter(name: str) -> type:
    return type(name, (), {"__module__": "mine", "__qualname__": name})


FIRST = """
    from verl_omni.pipelines.model_base import DiffusionModelBase
    from verl_omni.config import DiffusionModelConfig

    @DiffusionModelBase.register("QwenImagePipeline", algorithm="my_algo")
    class Mine(DiffusionModelBase):
        pass

    def found(algorithm):
        return DiffusionModelBase.get_class(DiffusionModelConfig(architecture="QwenImagePipeline", algorithm=algorithm))

    print(*(found(name).__name__ for name in ("my_algo", "flow_grpo", "grpo_guard", "dpo", "mix_grpo")))
"""


def test_an_adapter_that_comes_before_the_built_in_one_serves_its_own_algorithm_alone():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(FIRST)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Mine", "QwenImage", "QwenImage", "QwenImage", "QwenImage"]


def test_the_exact_pair_wins_then_the_family(adapters):
    family, own = adapter("Family"), adapter("Own")
    adapters.add("NewPipeline", "dance_grpo", own)
    adapters.add("NewPipeline", "flow_grpo", family)
    assert adapters.find("NewPipeline", "dance_grpo") is own
    assert adapters.find("NewPipeline", "mix_grpo") is family


def test_a_strangers_adapter_serves_nobody_else_though_it_is_alone(adapters):
    adapters.add("NewPipeline", "dpo", adapter("ForPairs"))
    expected = 'NewPipeline has no model adapter for algorithm "mix_grpo", only for dpo: register one with '
    with pytest.raises(ValueError, match=f'{expected}algorithm="flow_grpo"'):
        adapters.find("NewPipeline", "mix_grpo")


def test_an_algorithm_that_only_an_adapter_knows_is_flow_grpo(adapters):
    with pytest.raises(ValueError, match='unknown algorithm "adapted_only".*external_lib'):
        get_algorithm("adapted_only")
    adapters.add("NewPipeline", "adapted_only", adapter("Mine"))
    algorithm = get_algorithm("adapted_only")
    assert (algorithm.name, algorithm.loss, algorithm.adv_estimator) == ("adapted_only", "flow_grpo", "flow_grpo")
    assert "adapted_only" in registry.algorithm_names()


def test_a_pair_is_taken_once(adapters):
    adapters.add("NewPipeline", "flow_grpo", adapter("One"))
    adapters.add("NewPipeline", "flow_grpo", adapter("One"))  # the same definition, imported again
    taken = 'model adapter of NewPipeline for algorithm "flow_grpo" is already registered by mine.One: choose another'
    with pytest.raises(ValueError, match=taken):
        adapters.add("NewPipeline", "flow_grpo", adapter("Other"))
    with pytest.raises(ValueError, match="already registered by verl_omni.*QwenImage: choose another for mine.Other"):
        DiffusionModelBase.register("QwenImagePipeline")(adapter("Other"))


def test_vllm_omni_is_told_of_in_one_honest_line(monkeypatch):
    monkeypatch.setattr(VllmOmniPipelineBase, "registry", AdapterRegistry("vLLM-Omni rollout"))
    with pytest.raises(ValueError, match="no vLLM-Omni rollout adapter is registered for QwenImagePipeline") as caught:
        VllmOmniPipelineBase.get_class("QwenImagePipeline", "flow_grpo")
    assert "did you mean" not in str(caught.value) and "\n" not in str(caught.value)
    mine = VllmOmniPipelineBase.register("QwenImagePipeline", algorithm="flow_grpo")(adapter("WithLogProb"))
    assert VllmOmniPipelineBase.get_class("QwenImagePipeline", "mix_grpo") is mine


def test_an_unknown_architecture_comes_with_the_nearest():
    config = DiffusionModelConfig(architecture="QwenImagesPipeline")
    with pytest.raises(ValueError, match='model architecture "QwenImagesPipeline": did you mean "QwenImagePipeline"'):
        DiffusionModelBase.get_class(config)


def test_both_halves_of_guidance_are_one_methods():
    """What an adapter says of one prompt is asked for the negative one too, with that one's features."""

    class OneHalf(DiffusionModelBase):
        @classmethod
        def model_inputs(cls, module, model_config, sample, timestep, prompt):
            return {"x": sample, "t": timestep, "text": prompt["prompt_embeds"], "pooled": prompt["pooled"]}

    def inputs(cfg: float):
        config = DiffusionModelConfig(pipeline=DiffusionPipelineConfig(true_cfg_scale=cfg))
        texts = [torch.ones(2, 3), None, torch.zeros(2, 3), None]
        batch = {"pooled": torch.tensor([5.0]), "negative_pooled": torch.tensor([6.0])}
        latents, timesteps = torch.arange(12.0).view(2, 3, 2), torch.arange(6.0).view(2, 3)
        return OneHalf.prepare_model_inputs(None, config, latents, timesteps, *texts, batch, 1)

    positive, negative = inputs(cfg=4.0)
    for half, text, pooled in ((positive, 1.0, 5.0), (negative, 0.0, 6.0)):
        assert half["x"].tolist() == [[2.0, 3.0], [8.0, 9.0]] and half["t"].tolist() == [1.0, 4.0]
        assert half["text"].mean() == text and half["pooled"].item() == pooled
    assert inputs(cfg=1.0)[1] is None
    assert OneHalf.missing_for_training() == [] and DiffusionModelBase.missing_for_training() == ["model_inputs"]
