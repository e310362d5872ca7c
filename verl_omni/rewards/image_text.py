"""How well an image and a text agree for CLIP, SigLIP and their like: the cosine of two embeddings."""

from typing import TYPE_CHECKING, Any

from verl_omni.rewards.image_tensors import prepared
from verl_omni.rewards.torch_models import ModelScorer

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class ImageTextScorer(ModelScorer):
    """A subclass sets `model`, `tokenizer` and `image_processor`, and makes a score of the cosine."""

    model: Any
    tokenizer: Any
    image_processor: Any

    def of_cosine(self, cosine: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """As `score`, of the cosine of each picture and its prompt."""
        raise NotImplementedError

    def score(self, pictures: list["Image"], prompts: list[str]) -> dict[str, "torch.Tensor"]:
        return self.of_cosine((self.embed(self.pixels(pictures)) * self.embed_texts(prompts)).sum(-1))

    def of_pixels(self, pixels: "torch.Tensor", prompts: list[str]) -> "torch.Tensor":
        """Scores (B,) of pixels (B, 3, H, W) in [0, 1], with a gradient to them."""
        import torch

        with torch.no_grad():
            texts = self.embed_texts(self._checked_prompts(prompts, len(pixels)))
        return self.of_cosine((self.embed(self.prepared(pixels)) * texts).sum(-1))["score"]

    def embed(self, inputs: dict[str, "torch.Tensor"]) -> "torch.Tensor":
        """A unit vector for each image, as `pixels` or `prepared` made it ready."""
        inputs = {key: value.to(self.device) for key, value in inputs.items()}
        inputs["pixel_values"] = inputs["pixel_values"].to(self.dtype)
        return unit(self.model.get_image_features(**inputs).pooler_output)

    def pixels(self, pictures: list["Image"]) -> dict[str, "torch.Tensor"]:
        """What the model takes of pictures."""
        return dict(self.image_processor(images=pictures, return_tensors="pt"))

    def prepared(self, pixels: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """The same of pixels (B, 3, H, W) in [0, 1], with a gradient to them."""
        return {"pixel_values": prepared(pixels, self.image_processor)}

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
