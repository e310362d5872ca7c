from verl_omni.pipelines.model_base import VllmOmniPipelineBase


class MyModelPipeline:
    """Stands for the class of that name in `vllm_omni.diffusion.models`, which is not installed here."""


@VllmOmniPipelineBase.register("MyModelPipeline", algorithm="flow_grpo")
class MyModelPipelineWithLogProb(MyModelPipeline):
    pass
