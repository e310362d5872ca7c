"""How well an image and a text agree for CLIP, SigLIP and their like: the cosine of two embeddings."""

from typing import TYPE_CHECKING, Any

from verl_omni.rewards.torch_models import ModelScorer

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class ImageTextScorer(ModelScorer):
    """A subclass sets `model`, `tokenizer` and `image_processor`, and makes a score of the cosine."""

    model: Any
    tokenizer: Any
    image_processor: Any

    def cosine(self, pictures: list["Image"], prompts: list[str]) -> "torch.Tensor":
        """Of each picture and its prompt."""
        return (self.embed_pictures(pictures) * self.embed_texts(prompts)).sum(-1)

    def embed_pictures(self, pictures: list["Image"]) -> "torch.Tensor":
        """A unit vector for each."""
        inputs = self.pixels(pictures)
        inputs = {key: value.to(self.device) for key, value in inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        return unit(self.model.get_image_features(**inputs).pooler_output)

    def pixels(self, pictures: list["Image"]) -> dict[str, "torch.Tensor"]:
        return dict(self.image_processor(images=pictures, return_tensors="pt"))

    def embed_texts(self, prompts: list[str]) -> "torch.Tensor":
        """A unit vector for each; a prompt that comes several times is embedded once.

        A text that is too long is cut. All are padded to the full length, and no mask is given: SigLIP was trained
        that way, and CLIP's text only looks back, so that for its end token there is no padding.
        """
        texts = list(dict.fromkeys(prompts))
        limit = self.model.config.text_config.max_position_embeddings
        ids = self.tokenizer(
            texts, padding="max_length", padding_side="right", truncation=True, max_length=limit, return_tensors="pt"
        )["input_ids"]
        embedded = unit(self.model.get_text_features(input_ids=ids.to(self.device)).pooler_output)
        return embedded[[texts.index(prompt) for prompt in prompts]]


def unit(vectors: "torch.Tensor") -> "torch.Tensor":
    """Of length 1, in float32."""
    return vectors.float() / vectors.float().norm(dim=-1, keepdim=True)


def prepared(pixels: "torch.Tensor", processor: Any) -> "torch.Tensor":
    """What CLIP's image processor makes of pixels (B, 3, H, W) in [0, 1], with a gradient to them."""
    import torch

    height, width = pixels.shape[-2:]
    edge, crop = processor.size["shortest_edge"], processor.crop_size
    size = [max(edge, int(side * edge / min(height, width))) for side in (height, width)]
    resized = torch.nn.functional.interpolate(pixels.float(), size, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = (size[0] - crop["height"]) // 2, (size[1] - crop["width"]) // 2
    cut = resized[..., top : top + crop["height"], left : left + crop["width"]]
    mean, std = (torch.tensor(value).to(cut).view(3, 1, 1) for value in (processor.image_mean, processor.image_std))
    return (cut - mean) / std
