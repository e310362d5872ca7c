"""The seam to vLLM-Omni: a pipeline of its, which draws with our loop, and its transformer as our adapters call it."""

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.adapter_registry import AdapterRegistry
from verl_omni.utils.errors import RequestAborted

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import DiffusionOutput
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch

INSTALL = (
    "make vllm-omni (a clone, on a CPU), pip install 'verl-omni[vllm-omni]' in an environment of its own (CUDA), or, "
    "on a CPU without a clone, pip install 'verl-omni[vllm-omni-cpu]' and VLLM_TARGET_DEVICE=empty "
    "VLLM_VERSION_OVERRIDE=0.26.0 pip install --no-deps --no-build-isolation --no-binary vllm vllm==0.26.0 "
    "vllm-omni==0.26.0 cache-dit==1.3.0 xgrammar==0.2.8"
)

# Built-in adapters, imported when their architecture is first asked for.
_BUILTIN: dict[str, str] = {
    "Flux2KleinPipeline": "verl_omni.pipelines.flux2.vllm_omni_rollout_adapter",
    "Flux2Pipeline": "verl_omni.pipelines.flux2.vllm_omni_rollout_adapter",
    "FluxPipeline": "verl_omni.pipelines.flux.vllm_omni_rollout_adapter",
    "GlmImagePipeline": "verl_omni.pipelines.glm_image.vllm_omni_rollout_adapter",
    "LTX2Pipeline": "verl_omni.pipelines.ltx2.vllm_omni_rollout_adapter",
    "QwenImageEditPlusPipeline": "verl_omni.pipelines.qwen_image_edit_plus.vllm_omni_rollout_adapter",
    "QwenImagePipeline": "verl_omni.pipelines.qwen_image.vllm_omni_rollout_adapter",
    "StableDiffusion3Pipeline": "verl_omni.pipelines.sd3.vllm_omni_rollout_adapter",
    "WanImageToVideoPipeline": "verl_omni.pipelines.wan_image_to_video.vllm_omni_rollout_adapter",
    "WanPipeline": "verl_omni.pipelines.wan.vllm_omni_rollout_adapter",
    "ZImagePipeline": "verl_omni.pipelines.z_image.vllm_omni_rollout_adapter",
}


def installed() -> bool:
    """Whether there is more of it than a folder of that name on the path."""
    spec = importlib.util.find_spec("vllm_omni")
    return spec is not None and spec.origin is not None


class Draws(Protocol):
    """Who runs the denoising loop: `verl_omni.pipelines.drawing.Drawer`."""

    def draw(self, requests: list[Any]) -> list[Any]:
        """A sample for each request."""


class AsDiffusers(torch.nn.Module):
    """A transformer of vLLM-Omni that is called like diffusers' own. It is a view: it holds no parameters."""

    def __init__(self, predict: Callable[..., Any], config: Any):
        super().__init__()
        self.predict, self.__dict__["config"] = predict, config

    def forward(self, return_dict: bool = False, **inputs: Any) -> tuple[Any]:
        return (self.predict(**inputs),)


class VllmOmniPipelineBase:
    """Base of a rollout adapter, before the pipeline of vLLM-Omni that it makes draw with our loop.

    An adapter says how that pipeline's transformer is called with the arguments of diffusers' (`predict`). Prompts are
    encoded and latents decoded by the model's training adapter, with the encoders and the VAE of that pipeline; it
    gives them the helpers that it lacks.
    """

    registry: ClassVar[AdapterRegistry] = AdapterRegistry("vLLM-Omni rollout", _BUILTIN if installed() else {})
    #: vLLM-Omni would make batches of one without it
    supports_request_batch: ClassVar[bool] = True
    #: given by who builds the pipeline
    drawer: Draws

    @classmethod
    def register(cls, architecture: str, algorithm: str = "flow_grpo"):
        """Class decorator: this adapter serves `architecture` (the `_class_name` in model_index.json)."""

        def wrap(adapter: type) -> type:
            cls.registry.add(architecture, algorithm, adapter)
            return adapter

        return wrap

    @classmethod
    def get_class(cls, architecture: str, algorithm: str) -> type:
        cls.check(architecture)
        return cls.registry.find(architecture, algorithm)

    @classmethod
    def check(cls, architecture: str) -> None:
        """Raise one line where there is no adapter. Imports none."""
        known = sorted({*cls.registry.adapters, *cls.registry.builtin})
        if architecture not in known:
            there = f"only for {', '.join(known)}" if known else "nor for another"
            missing = "" if installed() else f", and vllm-omni is not installed here: type {INSTALL}"
            raise ValueError(
                f"no vLLM-Omni rollout adapter is registered for {architecture}, {there}{missing}. The diffusers "
                "engine (actor_rollout_ref.rollout.name=diffusers) samples with the training adapter"
            )

    def as_diffusers(self, model_config: DiffusionModelConfig) -> torch.nn.Module:
        """What predicts, as the training adapter calls it."""
        return AsDiffusers(self.predict, self.transformer)

    def predict(self, **inputs: Any) -> Any:
        """One call of the transformer with the arguments that diffusers' takes: what that returns first."""
        raise NotImplementedError(f"{type(self).__name__} has no predict")

    def forward(self, req: "DiffusionRequestBatch") -> list["DiffusionOutput"]:
        """The samples of a batch, as the worker of vLLM-Omni asks for them."""
        from vllm_omni.diffusion.data import DiffusionOutput

        requests = [params.extra_args["request"] for params in req.sampling_params_list]
        with torch.inference_mode(False):  # its tensors could not be trained on
            try:
                samples = self.drawer.draw(requests)
            except RequestAborted as aborted:  # no fault, as which vLLM-Omni would log it
                samples = [aborted] * len(requests)
        return [DiffusionOutput(output=sample) for sample in samples]
