"""A small Qwen-Image checkpoint that draws three-digit numbers badly: what the quickstart starts from.

It lies in `model/` beside this file, in float16. It was trained by the functions below with the default recipe; another
machine or number of threads rounds differently and ends with other weights:

    python -m verl_omni.quickstart.checkpoint --out DIR [--score]     # some minutes on a CPU

All parts are diffusers' and transformers' own classes, and the result is a folder for ``QwenImagePipeline``. VAE and
transformer are trained from scratch on drawn signs, with the training numbers only; the text encoder keeps its random
weights, which are enough to tell ten digits apart. The transformer stops early on purpose: less than half of what it
draws can be read, and the rest is left for reinforcement learning.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from verl_omni.pipelines.single_frame_vae import speed_up_single_frames
from verl_omni.pipelines.utils import weights_in
from verl_omni.quickstart import task
from verl_omni.quickstart.made import made_whole, write_recipe
from verl_omni.testing.tiny_random import QWEN_IMAGE_PREFIX
from verl_omni.testing.tiny_text import qwen_text_encoder, qwen_tokenizer
from verl_omni.utils.options import Parser, at_least

if TYPE_CHECKING:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

TEXT_WIDTH = 64
LATENT_CHANNELS = 4
NUM_INFERENCE_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the checkpoint is trained."""

    seed: int = 0
    images_per_number: int = 8
    vae_steps: int = 200
    vae_batch: int = 16
    vae_lr: float = 5e-3
    vae_kl: float = 1e-3
    transformer_steps: int = 800
    transformer_batch: int = 64
    transformer_lr: float = 1e-3
    transformer_warmup: int = 50


def build_checkpoint(out: str | Path, recipe: Recipe | None = None) -> Path:
    """Train the checkpoint into the folder ``out``, which appears only when complete; on a GPU if there is one."""
    out, recipe = Path(out), recipe or Recipe()
    with made_whole(out) as folder, torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        pipeline = _train(recipe, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        pipeline.to(torch.float16).save_pretrained(folder)
        write_recipe(folder, dataclasses.asdict(recipe))
    return out


def held_out_scores(checkpoint: str | Path, seed: int = 0) -> list[dict]:
    """Draw every held-out number once with diffusers' own pipeline and let the OCR read it."""
    from verl_omni.rewards.scorers.ocr import compute_score_ocr_line

    _, held_out = task.split_numbers()
    return compute_score_ocr_line(list(draw(load_pipeline(checkpoint), held_out, seed)), held_out)


def load_pipeline(checkpoint: str | Path, **components: torch.nn.Module) -> "QwenImagePipeline":
    """diffusers' own pipeline of a checkpoint; `components` stand in for those of the folder."""
    from diffusers import QwenImagePipeline

    pipeline = QwenImagePipeline.from_pretrained(checkpoint, **weights_in(torch.float32), **components)
    pipeline.to("cuda" if torch.cuda.is_available() else "cpu")
    pipeline.set_progress_bar_config(disable=True)
    speed_up_single_frames(pipeline.vae)
    return pipeline


def draw(pipeline: "QwenImagePipeline", numbers: list[str], seed: int) -> torch.Tensor:
    """A sign for each number, (B, 3, H, W) in [0, 1]; the seed says which noise they are made from."""
    return pipeline(
        [task.prompt_for(number) for number in numbers],
        height=task.HEIGHT,
        width=task.WIDTH,
        num_inference_steps=NUM_INFERENCE_STEPS,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images


def _train(recipe: Recipe, device: torch.device) -> "QwenImagePipeline":
    pipeline = _untrained_pipeline().to(device)
    numbers, _ = task.split_numbers()
    rng = np.random.default_rng(recipe.seed)
    signs = np.stack([task.draw_sign(number, rng) for number in numbers for _ in range(recipe.images_per_number)])
    images = torch.from_numpy(signs).to(device).permute(0, 3, 1, 2)[:, :, None] / 127.5 - 1

    _train_vae(speed_up_single_frames(pipeline.vae), images, recipe)
    latents = encode(pipeline.vae, images)
    with torch.no_grad():
        prompt_embeds, _ = pipeline.encode_prompt([task.prompt_for(number) for number in numbers])
    _train_transformer(pipeline, latents, prompt_embeds.repeat_interleave(recipe.images_per_number, 0), recipe)
    return pipeline.to("cpu")


def _untrained_pipeline() -> "QwenImagePipeline":
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    tokenizer = qwen_tokenizer([QWEN_IMAGE_PREFIX, "assistant\n", 'a sign that reads "'])
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    return QwenImagePipeline(scheduler, vae, qwen_text_encoder(tokenizer, TEXT_WIDTH), tokenizer, transformer)


def _train_vae(vae: "AutoencoderKLQwenImage", images: torch.Tensor, recipe: Recipe) -> None:
    with torch.no_grad():  # a wide posterior at the start drowns the latents in noise: some seeds never leave that
        vae.quant_conv.bias[vae.config.z_dim :] = -6.0
    optimizer = torch.optim.AdamW(vae.parameters(), recipe.vae_lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.vae_lr, total_steps=recipe.vae_steps, pct_start=0.2
    )
    bar = tqdm(range(recipe.vae_steps), desc="pre-training the VAE", unit="step")
    for _ in bar:
        target = images[torch.randint(len(images), (recipe.vae_batch,))]
        posterior = vae.encode(target).latent_dist
        error = F.mse_loss(vae.decode(posterior.sample()).sample, target)
        divergence = posterior.kl().mean() / posterior.mean[0].numel()
        take_step(vae, optimizer, schedule, error + recipe.vae_kl * divergence)
        bar.set_postfix(error=f"{error.item():.4f}", refresh=False)


@torch.no_grad()
def encode(vae: "AutoencoderKLQwenImage", images: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, 1, H, W) with mean 0 and standard deviation 1 by channel, as the VAE's config then says."""
    latents = torch.cat([vae.encode(chunk).latent_dist.mean for chunk in images.split(256)])
    mean, std = latents.mean((0, 2, 3, 4)), latents.std((0, 2, 3, 4))
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    return (latents - mean.view(-1, 1, 1, 1)) / std.view(-1, 1, 1, 1)


def _train_transformer(
    pipeline: "QwenImagePipeline", latents: torch.Tensor, prompt_embeds: torch.Tensor, recipe: Recipe
) -> None:
    """Flow matching: from ``x_t = (1 - t) x + t noise`` predict ``noise - x``, t uniform in [0, 1]."""
    torch.manual_seed(recipe.seed)
    transformer, device = pipeline.transformer, latents.device
    channels, _, height, width = latents.shape[1:]
    clean = pipeline._pack_latents(latents, len(latents), channels, height, width)
    shapes = [[(1, height // 2, width // 2)]] * recipe.transformer_batch
    optimizer = torch.optim.AdamW(transformer.parameters(), recipe.transformer_lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / recipe.transformer_warmup))
    bar = tqdm(range(recipe.transformer_steps), desc="pre-training the transformer", unit="step")
    for _ in bar:
        chosen = torch.randint(len(clean), (recipe.transformer_batch,))
        x = clean[chosen]
        noise = torch.randn(x.shape).to(device)
        t = torch.rand(len(x)).to(device)
        velocity = transformer(
            hidden_states=torch.lerp(x, noise, t[:, None, None]),
            timestep=t,
            encoder_hidden_states=prompt_embeds[chosen],
            img_shapes=shapes,
            return_dict=False,
        )[0]
        loss = F.mse_loss(velocity, noise - x)
        take_step(transformer, optimizer, schedule, loss)
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


def take_step(module: torch.nn.Module, optimizer: Any, schedule: Any, loss: torch.Tensor) -> None:
    """Down the gradient of the loss, which is clipped."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    schedule.step()


def main() -> None:
    parser = Parser(description="Train the quickstart's checkpoint from scratch.")
    parser.add_argument("--out", required=True, help="folder to write, for QwenImagePipeline.from_pretrained")
    parser.add_argument(
        "--steps", type=at_least(1), default=Recipe.transformer_steps, help="of the transformer (%(default)s)"
    )
    parser.add_argument("--score", action="store_true", help="then draw the held-out numbers and read them")
    args = parser.parse_args()
    try:
        out = build_checkpoint(args.out, dataclasses.replace(Recipe(), transformer_steps=args.steps))
    except FileExistsError as error:
        parser.error(str(error))
    print(out)
    if args.score:
        results = held_out_scores(out)
        for name in ("score", "exact"):
            print(f"held-out {name}: {sum(result[name] for result in results) / len(results):.3f}")


if __name__ == "__main__":
    main()
