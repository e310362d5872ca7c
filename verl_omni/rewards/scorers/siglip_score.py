"""Does the image show what the prompt says, for SigLIP (arXiv 2303.15343) or SigLIP 2 (arXiv 2502.14786)?"""

from typing import TYPE_CHECKING, Literal

from verl_omni.rewards.image_text import ImageTextScorer
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, load_model, load_pretrained

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

Scale = Literal["probability", "cosine"]


@register_reward("siglip_score", reads=("prompt",))
class SiglipScore(ImageTextScorer):
    """The probability that image and prompt belong together, or the cosine of their embeddings.

    The probability is the model's own, sigmoid(exp(scale) cos + bias). For published models it is near 0 for many
    images that people find fair; the cosine tells those apart too. Answers with ``score`` and the bare ``cosine``.
    """

    def __init__(
        self,
        *,
        model: str = "google/siglip2-so400m-patch14-384",
        scale: Scale = "probability",
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
        frames: Frames = None,
    ):
        from transformers import AutoModel, AutoTokenizer, Siglip2ImageProcessorPil, SiglipImageProcessorPil

        super().__init__("siglip_score", device, dtype, batch_size, frames)
        self.scale = scale
        self.model = load_model(AutoModel, model, self.name, self.dtype).to(self.device)
        self.tokenizer = load_pretrained(AutoTokenizer, model, self.name)
        # "siglip2" is the model for images of any shape. SigLIP 2 of one size has the architecture "siglip".
        any_shape = self.model.config.model_type == "siglip2"
        processor = Siglip2ImageProcessorPil if any_shape else SiglipImageProcessorPil
        self.image_processor = load_pretrained(processor, model, self.name)

    def embed_texts(self, prompts: list[str]) -> "torch.Tensor":
        """SigLIP knows small letters only. The tokenizer of its first version makes them, that of its second not."""
        return super().embed_texts([prompt.lower() for prompt in prompts])

    def score(self, pictures: list["Image"], prompts: list[str]) -> dict[str, "torch.Tensor"]:
        cosine = self.cosine(pictures, prompts)
        if self.scale == "cosine":
            return {"score": cosine, "cosine": cosine}
        logit = self.model.logit_scale.float().exp() * cosine + self.model.logit_bias.float()
        return {"score": logit.sigmoid(), "cosine": cosine}
