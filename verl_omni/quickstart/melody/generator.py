"""A small LongCat-AudioDiT that plays any four notes: what the task of the melody starts from.

It lies in `model/` beside this file, in float16, and was made by

    python -m verl_omni.quickstart.melody.generator --out DIR        # minutes on a CPU

All parts are diffusers' and transformers' own classes, and the result is a folder for ``LongCatAudioDiTPipeline``. VAE
and transformer are trained from scratch on notes that are drawn by lot and played here; the text encoder keeps its
random weights. Which four notes are wanted is left for reinforcement learning.
"""

import dataclasses
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from verl_omni.pipelines.utils import weights_in
from verl_omni.quickstart.checkpoint import take_step
from verl_omni.quickstart.made import made_whole, write_recipe
from verl_omni.quickstart.melody import task
from verl_omni.testing.tiny_text import t5_encoder, t5_tokenizer
from verl_omni.utils.options import Parser, at_least

if TYPE_CHECKING:
    from diffusers import LongCatAudioDiTPipeline

TEXT_WIDTH = 64
LATENT_CHANNELS = 8
STRIDES = (8, 8)  # even ones: with odd ones a sound comes back shorter
NUM_INFERENCE_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the checkpoint is trained."""

    seed: int = 0
    sounds: int = 6000
    vae_steps: int = 400
    vae_batch: int = 16
    vae_lr: float = 5e-3
    vae_pull: float = 1e-4
    transformer_steps: int = 300
    transformer_batch: int = 64
    transformer_lr: float = 1e-3
    transformer_warmup: int = 50


def build_generator(out: str | Path, recipe: Recipe | None = None) -> Path:
    """Train it into the folder `out`, which appears only when complete."""
    out, recipe = Path(out), recipe or Recipe()
    with made_whole(out) as folder, torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        _train(recipe).to(torch.float16).save_pretrained(folder)
        write_recipe(folder, dataclasses.asdict(recipe))
    return out


def scores(folder: str | Path, count: int = 200, seed: int = 0) -> list[dict[str, float]]:
    """Let diffusers' own pipeline play some tunes, and listen for the wanted melody."""
    from diffusers import LongCatAudioDiTPipeline

    pipeline = LongCatAudioDiTPipeline.from_pretrained(folder, **weights_in(torch.float32))
    pipeline.set_progress_bar_config(disable=True)
    sounds = pipeline(
        [task.PROMPT] * count,
        audio_duration_s=task.SECONDS,
        num_inference_steps=NUM_INFERENCE_STEPS,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).audios
    return heard(sounds, [task.MELODY] * count)


def heard(sounds: torch.Tensor, melodies: list[str]) -> list[dict[str, float]]:
    from verl_omni.rewards.scorers.pitch import compute_score_pitch

    rates = [task.SAMPLE_RATE] * len(melodies)
    return compute_score_pitch(list(sounds.clamp(-1, 1)), rates, [task.named_notes(melody) for melody in melodies])


def _train(recipe: Recipe) -> "LongCatAudioDiTPipeline":
    pipeline = _untrained_pipeline()
    rng = np.random.default_rng(recipe.seed)
    chosen = [task.any_notes(rng) for _ in range(recipe.sounds)]
    sounds = torch.from_numpy(np.stack([task.play(melody, rng) for melody in chosen]))[:, None]
    _train_vae(pipeline.vae, sounds, recipe)
    latents = _encode(pipeline.vae, sounds)
    with torch.no_grad():
        told = heard(pipeline.vae.decode(latents[:100]).sample, chosen[:100])
    print(f"through the VAE what is played scores {fmean(one['score'] for one in told):.3f}", flush=True)
    _train_transformer(pipeline, latents.transpose(1, 2), recipe)
    return pipeline


def _untrained_pipeline() -> "LongCatAudioDiTPipeline":
    from diffusers import LongCatAudioDiTPipeline, LongCatAudioDiTTransformer, LongCatAudioDiTVae

    tokenizer = t5_tokenizer()
    vae = LongCatAudioDiTVae(
        channels=4,
        c_mults=[2, 4],
        strides=list(STRIDES),
        latent_dim=LATENT_CHANNELS,
        encoder_latent_dim=2 * LATENT_CHANNELS,
        act_fn="elu",
        downsampling_ratio=int(np.prod(STRIDES)),
        sample_rate=task.SAMPLE_RATE,
        scale=1.0,
    )
    transformer = LongCatAudioDiTTransformer(
        dit_dim=64,
        dit_depth=2,
        dit_heads=4,
        dit_text_dim=TEXT_WIDTH,
        latent_dim=LATENT_CHANNELS,
        text_conv=False,
        use_latent_condition=False,
        ff_mult=2.0,
    )
    text_encoder = t5_encoder(tokenizer, "UMT5", TEXT_WIDTH)
    return LongCatAudioDiTPipeline(vae, text_encoder, tokenizer, transformer)


def _train_vae(vae: torch.nn.Module, sounds: torch.Tensor, recipe: Recipe) -> None:
    """To give back what it is given. Noise is small beside the latents, which `vae_pull` keeps from growing."""
    optimizer = torch.optim.AdamW(vae.parameters(), recipe.vae_lr, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.vae_lr, total_steps=recipe.vae_steps, pct_start=0.2
    )
    for _ in range(recipe.vae_steps):
        target = sounds[torch.randint(len(sounds), (recipe.vae_batch,))]
        latents = vae.encode(target, sample_posterior=False).latents
        noisy = latents + 0.05 * latents.std().detach() * torch.randn_like(latents)
        error = F.mse_loss(vae.decode(noisy).sample, target)
        take_step(vae, optimizer, schedule, error + recipe.vae_pull * latents.square().mean())


@torch.no_grad()
def _encode(vae: torch.nn.Module, sounds: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, time) with standard deviation 1, as the VAE's config then says."""
    latents = torch.cat([vae.encode(chunk, sample_posterior=False).latents for chunk in sounds.split(256)])
    scale = latents.std().item()
    vae.register_to_config(scale=scale)
    return latents / scale


def _train_transformer(pipeline: "LongCatAudioDiTPipeline", clean: torch.Tensor, recipe: Recipe) -> None:
    """Flow matching as upstream has it: time 1 - t runs from noise to data, and the velocity is data - noise."""
    transformer, batch = pipeline.transformer, recipe.transformer_batch
    embeds, _ = pipeline.encode_prompt([task.PROMPT], torch.device("cpu"))
    embeds = embeds.expand(batch, -1, -1)
    everything = torch.ones(batch, clean.shape[1], dtype=torch.bool)
    all_text = torch.ones(embeds.shape[:2], dtype=torch.bool)
    optimizer = torch.optim.AdamW(transformer.parameters(), recipe.transformer_lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / recipe.transformer_warmup))
    for _ in range(recipe.transformer_steps):
        x = clean[torch.randint(len(clean), (batch,))]
        noise, t = torch.randn_like(x), torch.rand(batch)
        velocity = transformer(
            hidden_states=torch.lerp(x, noise, t[:, None, None]),
            encoder_hidden_states=embeds,
            encoder_attention_mask=all_text,
            timestep=1 - t,
            attention_mask=everything,
            latent_cond=torch.zeros_like(x),
        ).sample
        take_step(transformer, optimizer, schedule, F.mse_loss(velocity, x - noise))


def main() -> None:
    parser = Parser(description="Train the generator of melodies from scratch.")
    parser.add_argument("--out", required=True, help="folder to write, for LongCatAudioDiTPipeline.from_pretrained")
    parser.add_argument(
        "--steps", type=at_least(1), default=Recipe.transformer_steps, help="of the transformer (%(default)s)"
    )
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be 1 or more")
    try:
        out = build_generator(args.out, dataclasses.replace(Recipe(), transformer_steps=args.steps))
    except FileExistsError as error:
        parser.error(str(error))
    told = scores(out)
    for name in ("score", "in_tune"):
        print(f"{name} of {task.MELODY}: {fmean(one[name] for one in told):.3f}")


if __name__ == "__main__":
    main()
