"""Does the image show what the prompt says, for CLIP (arXiv 2103.00020)?"""

from typing import TYPE_CHECKING, Literal

from verl_omni.rewards.image_text import ImageTextScorer
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, load_model, load_pretrained

if TYPE_CHECKING:
    import torch

Scale = Literal["flow_grpo", "paper"]


@register_reward("clip_score", reads=("prompt",))
class ClipScore(ImageTextScorer):
    """The cosine of the image's and the prompt's embedding, on one of two scales.

    "flow_grpo" is what Flow-GRPO and projects after it train on: the model's logit (100 times the cosine, for
    published models) divided by 30, near 1 for a good match. "paper" is that of CLIPScore (arXiv 2104.08718):
    2.5 max(cos, 0). Answers with ``score`` and the bare ``cosine``.
    """

    def __init__(
        self,
        *,
        model: str = "openai/clip-vit-large-patch14",
        scale: Scale = "flow_grpo",
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
        frames: Frames = None,
    ):
        from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

        super().__init__("clip_score", device, dtype, batch_size, frames)
        self.scale = scale
        self.model = load_model(CLIPModel, model, self.name, self.dtype).to(self.device)
        self.tokenizer = load_pretrained(AutoTokenizer, model, self.name)
        self.image_processor = load_pretrained(CLIPImageProcessorPil, model, self.name)

    def of_cosine(self, cosine: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        if self.scale == "paper":
            return {"score": 2.5 * cosine.clamp(min=0), "cosine": cosine}
        return {"score": self.model.logit_scale.float().exp() * cosine / 30, "cosine": cosine}
