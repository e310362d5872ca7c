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
