"""Does the image show what the prompt says, for SigLIP (arXiv 2303.15343) or SigLIP 2 (arXiv 2502.14786)?"""

from typing import TYPE_CHECKING, Literal

from verl_omni.rewards.image_tensors import normalised, resized
from verl_omni.rewards.image_text import ImageTextScorer
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, load_model, load_pretrained

if TYPE_CHECKING:
    import torch

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

    def prepared(self, pixels: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """For images of any shape: so many whole patches as there may be, which the processor counts, in rows."""
        import numpy as np
        from torch.nn import functional

        processor = self.image_processor
        if self.model.config.model_type != "siglip2":
            return super().prepared(pixels)
        inputs = dict(processor(images=[np.zeros((*pixels.shape[-2:], 3), np.uint8)], return_tensors="pt"))
        (down, across), patch = inputs["spatial_shapes"][0].tolist(), processor.patch_size
        image = resized(pixels, (down * patch, across * patch), processor.resample)
        image = normalised(image, processor.image_mean, processor.image_std)
        rows = image.unflatten(3, (across, patch)).unflatten(2, (down, patch)).permute(0, 2, 4, 3, 5, 1)
        rows = rows.reshape(len(pixels), down * across, -1)
        inputs = {key: value.expand(len(pixels), *value.shape[1:]) for key, value in inputs.items()}
        return inputs | {"pixel_values": functional.pad(rows, (0, 0, 0, processor.max_num_patches - down * across))}

    def embed_texts(self, prompts: list[str]) -> "torch.Tensor":
        """SigLIP knows small letters only. The tokenizer of its first version makes them, that of its second not."""
        return super().embed_texts([prompt.lower() for prompt in prompts])

    def of_cosine(self, cosine: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        if self.scale == "cosine":
            return {"score": cosine, "cosine": cosine}
        logit = self.model.logit_scale.float().exp() * cosine + self.model.logit_bias.float()
        return {"score": logit.sigmoid(), "cosine": cosine}
