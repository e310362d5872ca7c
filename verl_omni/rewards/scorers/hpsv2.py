"""Which image would people prefer for the prompt? HPS v2 (arXiv 2306.09341), from its published checkpoint."""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_omni.rewards.image_tensors import in_clips_units
from verl_omni.rewards.image_text import ImageTextScorer
from verl_omni.rewards.images import to_rgb_array
from verl_omni.rewards.published_weights import build_model, depth_of, find_file, read_tensors, shape_of
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, load_pretrained

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

# The model is transformers' CLIPModel, and the checkpoint has the names of open_clip.
NAMES = {
    "logit_scale": "logit_scale",
    "text_model.embeddings.token_embedding.weight": "token_embedding.weight",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm.weight": "ln_final.weight",
    "text_model.final_layer_norm.bias": "ln_final.bias",
    "text_projection.weight": "text_projection",
    "vision_model.embeddings.class_embedding": "visual.class_embedding",
    "vision_model.embeddings.position_embedding.weight": "visual.positional_embedding",
    "vision_model.embeddings.patch_embedding.weight": "visual.conv1.weight",
    "vision_model.pre_layrnorm.weight": "visual.ln_pre.weight",
    "vision_model.pre_layrnorm.bias": "visual.ln_pre.bias",
    "vision_model.post_layernorm.weight": "visual.ln_post.weight",
    "vision_model.post_layernorm.bias": "visual.ln_post.bias",
    "visual_projection.weight": "visual.proj",
}
LAYER = re.compile(r"(text|vision)_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
IN_LAYER = {
    "layer_norm1": "ln_1.",
    "layer_norm2": "ln_2.",
    "mlp.fc1": "mlp.c_fc.",
    "mlp.fc2": "mlp.c_proj.",
    "self_attn.out_proj": "attn.out_proj.",
    "self_attn.q_proj": "attn.in_proj_",
    "self_attn.k_proj": "attn.in_proj_",
    "self_attn.v_proj": "attn.in_proj_",
}
# Of ViT-H-14. The shapes in the checkpoint tell all the rest.
VISION_HEAD_WIDTH, TEXT_HEAD_WIDTH = 80, 64


def open_clip_name(name: str) -> str:
    """Where open_clip has a parameter of transformers' CLIPModel."""
    layer = LAYER.fullmatch(name)
    if layer is None:
        return NAMES[name]
    tower, number, part, kind = layer.groups()
    return f"{'visual.' if tower == 'vision' else ''}transformer.resblocks.{number}.{IN_LAYER[part]}{kind}"


def part_of(name: str, tensor: "torch.Tensor") -> "torch.Tensor":
    """open_clip has query, key and value in one tensor, and multiplies by its projections from the right."""
    for third, letter in enumerate("qkv"):
        if f"self_attn.{letter}_proj." in name:
            return tensor.chunk(3)[third]
    return tensor.T if name in ("text_projection.weight", "visual_projection.weight") else tensor


def config_of(weights: Mapping[str, "torch.Tensor"], end_token: int, where: str) -> Any:
    """The CLIPConfig of a checkpoint with open_clip's ViT-H-14, whatever its widths and depths."""
    from transformers import CLIPConfig

    def tower(prefix: str, width: int, head_width: int) -> dict[str, Any]:
        layers = f"{prefix}transformer.resblocks."
        return {
            "hidden_size": width,
            "intermediate_size": shape_of(weights, f"{layers}0.mlp.c_fc.weight", where)[0],
            "num_hidden_layers": depth_of(weights, layers),
            "num_attention_heads": width // head_width,
            "hidden_act": "gelu",
        }

    width, _, patch, _ = shape_of(weights, "visual.conv1.weight", where)
    side = math.isqrt(shape_of(weights, "visual.positional_embedding", where)[0] - 1)
    words, text_width = shape_of(weights, "token_embedding.weight", where)
    vision = tower("visual.", width, VISION_HEAD_WIDTH) | {"patch_size": patch, "image_size": patch * side}
    text = tower("", text_width, TEXT_HEAD_WIDTH) | {
        "vocab_size": words,
        "max_position_embeddings": shape_of(weights, "positional_embedding", where)[0],
        "bos_token_id": None,
        "eos_token_id": end_token,
    }
    projection = shape_of(weights, "text_projection", where)[1]
    return CLIPConfig(projection_dim=projection, vision_config=vision, text_config=text)


@register_reward("hpsv2", reads=("prompt",))
class HpsV2(ImageTextScorer):
    """cos(image, prompt) of a CLIP-H that was tuned on people's preferences: about 0.2 to 0.35.

    ``model`` is a file, or one on the hub: `xswu/HPSv2/HPS_v2.1_compressed.pt`, or `HPS_v2_compressed.pt` there for
    v2.0. Tables often show 100 times the score. ``tokenizer`` is where that comes from.
    """

    def __init__(
        self,
        *,
        model: str = "xswu/HPSv2/HPS_v2.1_compressed.pt",
        tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
        frames: Frames = None,
    ):
        from transformers import AutoTokenizer, CLIPModel

        super().__init__("hpsv2", device, dtype, batch_size, frames)
        where = f'reward.scorers.hpsv2.model="{model}"'
        weights = read_tensors(find_file(model, self.name), self.name)
        self.tokenizer = load_pretrained(AutoTokenizer, tokenizer, self.name, "tokenizer")
        config = config_of(weights, self.tokenizer.eos_token_id, where)
        clip = build_model(CLIPModel, config, weights, open_clip_name, where, self.dtype, part_of)
        self.model = clip.to(self.device)

    def pixels(self, pictures: list["Image"]) -> dict[str, "torch.Tensor"]:
        import torch

        size = self.model.config.vision_config.image_size
        return {"pixel_values": in_clips_units(torch.stack([letterbox(picture, size) for picture in pictures]))}

    def prepared(self, pixels: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        """As HPS v2 was trained: the longer side fills the square, black bars the rest; nothing is cropped."""
        return {"pixel_values": in_clips_units(letterboxed(pixels, self.model.config.vision_config.image_size))}

    def of_cosine(self, cosine: "torch.Tensor") -> dict[str, "torch.Tensor"]:
        return {"score": cosine}


def letterbox(picture: "Image", size: int) -> "torch.Tensor":
    """3 x size x size."""
    import torch

    pixels = torch.from_numpy(to_rgb_array(picture)).permute(2, 0, 1).float() / 255
    return letterboxed(pixels[None], size)[0]


def letterboxed(pixels: "torch.Tensor", size: int) -> "torch.Tensor":
    """B x 3 x size x size in [0, 1], or a little beyond where bicubic interpolation overshoots an edge."""
    from torch.nn import functional

    scale = size / max(pixels.shape[2:])
    height, width = (max(1, round(side * scale)) for side in pixels.shape[2:])
    small = functional.interpolate(pixels.float(), size=(height, width), mode="bicubic", antialias=True)
    left, top = (size - width) // 2, (size - height) // 2
    return functional.pad(small, (left, size - width - left, top, size - height - top))
