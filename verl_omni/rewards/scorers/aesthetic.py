"""Is the image beautiful, whatever the prompt? LAION's aesthetic predictor."""

from typing import TYPE_CHECKING

from verl_omni.rewards.image_text import ImageTextScorer
from verl_omni.rewards.published_weights import find_file, linear_head, read_tensors
from verl_omni.rewards.registry import register_reward
from verl_omni.rewards.torch_models import BatchSize, Dtype, Frames, load_model, load_pretrained
from verl_omni.utils.errors import RunError

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


@register_reward("aesthetic")
class Aesthetic(ImageTextScorer):
    """People's mark for the look of an image, about 1 to 10, from CLIP's embedding of it.

    ``model`` is the predictor: the file `sac+logos+ava1-l14-linearMSE.pth` of improved-aesthetic-predictor, or the
    copy of it on the hub. ``clip`` is the CLIP that it was trained on.
    """

    needs_prompts = False

    def __init__(
        self,
        *,
        model: str = "trl-lib/ddpo-aesthetic-predictor/aesthetic-model.pth",
        clip: str = "openai/clip-vit-large-patch14",
        device: str | None = None,
        dtype: Dtype = "float32",
        batch_size: BatchSize = 8,
        frames: Frames = None,
    ):
        from transformers import CLIPImageProcessorPil, CLIPModel

        super().__init__("aesthetic", device, dtype, batch_size, frames)
        where = f'reward.scorers.aesthetic.model="{model}"'
        self.head = linear_head(read_tensors(find_file(model, self.name), self.name), where)
        self.head.to(self.device)
        self.model = load_model(CLIPModel, clip, self.name, self.dtype, "clip")
        self.model.text_model = None  # nobody reads here
        self.model.to(self.device)
        self.image_processor = load_pretrained(CLIPImageProcessorPil, clip, self.name, "clip")
        if self.model.projection_dim != self.head[0].in_features:
            raise RunError(
                f'{where} is for embeddings of width {self.head[0].in_features}, and those of clip="{clip}" have '
                f"{self.model.projection_dim}: the published one is for CLIP ViT-L/14"
            )

    def of_pixels(self, pixels: "torch.Tensor") -> "torch.Tensor":
        """Scores (B,) of pixels (B, 3, H, W) in [0, 1], with a gradient to them."""
        return self.head(self.embed(self.prepared(pixels))).squeeze(-1)

    def score(self, pictures: list["Image"], prompts: list[str]) -> dict[str, "torch.Tensor"]:
        return {"score": self.head(self.embed(self.pixels(pictures))).squeeze(-1)}
