"""Which image would people pick for the prompt? PickScore (arXiv 2305.01569)."""

from typing import TYPE_CHECKING, Annotated

from verl_omni.config.knob import Range
from verl_omni.rewards.image_text import ImageTextScorer
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, load_model, load_pretrained

if TYPE_CHECKING:
    import torch


@register_reward("pickscore", reads=("prompt",))
class PickScore(ImageTextScorer):
    """exp(scale) cos(image, prompt) of a CLIP-H that was tuned on people's choices: around 20.

    Flow-GRPO divides it by 26: set ``divide_by=26`` to compare with its numbers. ``processor`` is where tokenizer and
    image processor come from; those of PickScore are the ones of the CLIP that it began as. Answers with ``score``
    and the bare ``cosine``.
    """

    def __init__(
        self,
        *,
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        divide_by: Annotated[float, Range(above=0)] = 1.0,
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
        frames: Frames = None,
    ):
        from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

        super().__init__("pickscore", device, dtype, batch_size, frames)
        self.divide_by = divide_by
        self.model = load_model(CLIPModel, model, self.name, self.dtype).to(self.device)
        self.tokenizer = load_pretrained(AutoTokenizer, processor, self.name, "processor")
        self.image_processor = load_pretrained(CLIPImageProcessorPil, processor, self.name, "processor")

    def of_cosine(self, cosine: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        return {"score": self.model.logit_scale.float().exp() * cosine / self.divide_by, "cosine": cosine}
