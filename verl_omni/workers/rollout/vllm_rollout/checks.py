"""Models that vLLM-Omni does not draw, told before it is started."""

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import read_index
from verl_omni.pipelines.vllm_omni import INSTALL, VllmOmniPipelineBase, installed

NAME = "actor_rollout_ref.rollout.name=vllm_omni"


def check_model(model: DiffusionModelConfig) -> None:
    if not installed():
        raise ValueError(f"{NAME}: vllm-omni is not installed here: type {INSTALL}, or choose diffusers")
    VllmOmniPipelineBase.check(model.architecture)
    for component in DiffusionModelBase.get_class(model).vllm_omni_needs:
        if (read_index(model.path).get(component) or [None])[0] is None:
            raise ValueError(
                f"{NAME}: vLLM-Omni's {model.architecture} needs a {component}, and {model.path} has none; choose "
                "diffusers"
            )
    for name, usual in (("load_format", "auto"), ("transformer_subfolder", "transformer"), ("config_path", None)):
        if getattr(model, name) != usual:
            raise ValueError(
                f"actor_rollout_ref.model.{name}={getattr(model, name)}: vLLM-Omni reads the model's folder as "
                f"diffusers writes it. Leave it out with {NAME}"
            )
