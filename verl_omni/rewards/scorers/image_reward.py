"""Which image would people prefer for the prompt? ImageReward (arXiv 2304.05977), from its published checkpoint."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_omni.rewards.image_tensors import cut, in_clips_units, resized
from verl_omni.rewards.published_weights import (
    build_model,
    check_names,
    depth_of,
    find_file,
    linear_head,
    read_tensors,
    shape_of,
)
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, ModelScorer, load_pretrained

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# Of the published model, over its training data.
MEAN, STD = 0.16717362830052426, 1.0333394966054072
# Tokens of a prompt, with [CLS] and [SEP].
MOST_TOKENS = 35
# Both encoders; the shapes in the checkpoint tell all the rest.
HEAD_WIDTH = 64

VISION, TEXT, HEAD = "blip.visual_encoder.", "blip.text_encoder.", "mlp.layers."
# What the checkpoint has and no score needs: BLIP's contrastive projections, and the numbers 0, 1, 2, ...
UNUSED = re.compile(r"blip\.(vision|text)_proj\.(weight|bias)|blip\.text_encoder\.embeddings\.position_ids")
# The vision encoder is transformers' BlipVisionModel, and the checkpoint has the names of timm.
VISION_NAMES = {
    "embeddings.class_embedding": "cls_token",
    "embeddings.position_embedding": "pos_embed",
    "embeddings.patch_embedding.": "patch_embed.proj.",
    "post_layernorm.": "norm.",
    "encoder.layers.": "blocks.",
    ".layer_norm": ".norm",
    ".self_attn.qkv.": ".attn.qkv.",
    ".self_attn.projection.": ".attn.proj.",
}


def vision_name(name: str) -> str:
    """Where the checkpoint has a parameter of BlipVisionModel."""
    for ours, theirs in VISION_NAMES.items():
        name = name.replace(ours, theirs)
    return VISION + name


def text_name(name: str) -> str:
    """Where it has one of BlipTextModel, which has the names of BLIP itself."""
    return TEXT + name


def split(weights: Mapping[str, "torch.Tensor"], where: str) -> list[dict[str, "torch.Tensor"]]:
    """The weights of the vision encoder, of the text encoder and of the head."""
    weights = {key: value for key, value in weights.items() if not UNUSED.fullmatch(key)}
    known = [{key: weights[key] for key in weights if key.startswith(prefix)} for prefix in (VISION, TEXT, HEAD)]
    check_names({key for part in known for key in part}, weights, where)
    return known


def vision_config(weights: Mapping[str, "torch.Tensor"], where: str) -> Any:
    """A BlipVisionConfig by the shapes of the weights."""
    from transformers import BlipVisionConfig

    width, _, patch, _ = shape_of(weights, f"{VISION}patch_embed.proj.weight", where)
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=shape_of(weights, f"{VISION}blocks.0.mlp.fc1.weight", where)[0],
        num_hidden_layers=depth_of(weights, f"{VISION}blocks."),
        num_attention_heads=width // HEAD_WIDTH,
        image_size=patch * math.isqrt(shape_of(weights, f"{VISION}pos_embed", where)[1] - 1),
        patch_size=patch,
        layer_norm_eps=1e-6,  # BLIP's own; transformers has 1e-5
    )


def text_config(weights: Mapping[str, "torch.Tensor"], where: str) -> Any:
    """A BlipTextConfig by the shapes of the weights."""
    from transformers import BlipTextConfig

    words, width = shape_of(weights, f"{TEXT}embeddings.word_embeddings.weight", where)
    return BlipTextConfig(
        vocab_size=words,
        hidden_size=width,
        encoder_hidden_size=shape_of(weights, f"{TEXT}encoder.layer.0.crossattention.self.key.weight", where)[1],
        intermediate_size=shape_of(weights, f"{TEXT}encoder.layer.0.intermediate.dense.weight", where)[0],
        num_hidden_layers=depth_of(weights, f"{TEXT}encoder.layer."),
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=shape_of(weights, f"{TEXT}embeddings.position_embeddings.weight", where)[0],
        is_decoder=True,  # that is, with cross attention; it looks both ways all the same
        bos_token_id=None,
        eos_token_id=None,
        sep_token_id=None,
    )


@register_reward("image_reward", reads=("prompt",))
class ImageReward(ModelScorer):
    """People's preference as a number with mean 0 and deviation 1 over ImageReward's data: about -2 to 2.

    BLIP's text encoder reads the prompt with an eye on the image, and a head makes a number of what it has at [CLS].
    ``model`` is a file, or one on the hub. ``tokenizer`` is BERT's. A prompt is cut after 35 tokens.
    """

    def __init__(
        self,
        *,
        model: str = "THUDM/ImageReward/ImageReward.pt",
        tokenizer: str = "google-bert/bert-base-uncased",
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
        frames: Frames = None,
    ):
        from transformers import AutoTokenizer, BlipTextModel, BlipVisionModel

        super().__init__("image_reward", device, dtype, batch_size, frames)
        where = f'reward.scorers.image_reward.model="{model}"'
        vision, text, head = split(read_tensors(find_file(model, self.name), self.name), where)
        self.vision = build_model(
            BlipVisionModel, vision_config(vision, where), vision, vision_name, where, self.dtype
        ).to(self.device)
        self.text = build_model(
            BlipTextModel, text_config(text, where), text, text_name, where, self.dtype, add_pooling_layer=False
        ).to(self.device)
        self.head = linear_head(head, where, HEAD).to(self.device)
        self.tokenizer = load_pretrained(AutoTokenizer, tokenizer, self.name, "tokenizer")

    def score(self, pictures: list["Image"], prompts: list[str]) -> dict[str, "torch.Tensor"]:
        import torch

        size = self.vision.config.image_size
        squares = torch.stack([torch.from_numpy(centre_square(picture, size)) for picture in pictures])
        return {"score": self._of_squares(squares, prompts)}

    def of_pixels(self, pixels: "torch.Tensor", prompts: list[str]) -> "torch.Tensor":
        """Scores (B,) of pixels (B, 3, H, W) in [0, 1], with a gradient to them."""
        prompts = self._checked_prompts(prompts, len(pixels))
        return self._of_squares(centre_squares(pixels, self.vision.config.image_size), prompts)

    def _of_squares(self, squares: "torch.Tensor", prompts: list[str]) -> "torch.Tensor":
        seen = self.vision(pixel_values=squares.to(self.device, self.dtype)).last_hidden_state
        tokens = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
        ).to(self.device)
        read = self.text(
            input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], encoder_hidden_states=seen
        ).last_hidden_state
        return (self.head(read[:, 0].float()).squeeze(-1) - MEAN) / STD


def centre_square(picture: "Image", size: int) -> np.ndarray:
    """The shorter side to `size`, the middle of the longer one, in CLIP's units: 3 x size x size."""
    from PIL.Image import Resampling
    from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    (width, height), (left, top) = middle(picture.size, size)
    square = picture.resize((width, height), Resampling.BICUBIC).crop((left, top, left + size, top + size))
    return ((np.array(square, np.float32) / 255 - OPENAI_CLIP_MEAN) / OPENAI_CLIP_STD).transpose(2, 0, 1)


def centre_squares(pixels: "torch.Tensor", size: int) -> "torch.Tensor":
    """The same of pixels (B, 3, H, W) in [0, 1], with a gradient to them."""
    from PIL.Image import Resampling

    sides, (top, left) = middle(pixels.shape[-2:], size)
    return in_clips_units(cut(resized(pixels, sides, Resampling.BICUBIC), top, left, (size, size)))


def middle(sides: Sequence[int], size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How long the sides become, and where the square begins on each."""
    sides = tuple(int(size * side / min(sides)) for side in sides)
    return sides, tuple(round((side - size) / 2) for side in sides)
