"""The tiny LTX-2 of `benchmarks.sync`: in its clips a picture changes once and a sound begins once, each when it likes.

    python -m benchmarks.sync_model DIR        # takes four minutes on a core

Decoders keep their random weights, but the video's sees one latent at a time, so that nothing moves where latents stay
as they are. Of random latents the two that look most different are the pictures, the quietest and the loudest are
silence and sound. The transformer learns clips of these, in which change and sound know nothing of each other:
a third of them score above .5, and an eighth of what it then draws. Random weights of the text encoder are drawn first,
and since transformers 5.11 (verl's own bound is below) otherwise: with those decoders sound and picture do not match.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from verl_omni.quickstart.checkpoint import take_step

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

THINGS = "ball bell drum door hammer gate clock wheel".split()
MOVES = "falls rings beats slams strikes swings ticks turns".split()
PROMPTS = [f"a {thing} {moves}" for thing in THINGS for moves in MOVES]
FRAMES, LATENT_FRAMES, SOUND_LATENTS, CHANNELS = 13, 7, 13, 8
# At 25 frames a second, 8 kHz and 10 ms a step of the spectrogram a sound's latent lasts as long as a frame.
PIPELINE: dict[str, Any] = dict(
    height=16, width=16, num_frames=FRAMES, frame_rate=25.0, num_inference_steps=5, guidance_scale=1.0,
    max_sequence_length=32,
)  # fmt: skip
CHANGES = 2, 6  # from and to, in latents of the video, which last as long as two of the sound
TRANSFORMER_STEPS, BATCH, NOISE = 800, 128, 0.1


def build(folder: str | Path) -> Path:
    """Write it for `LTX2Pipeline.from_pretrained`."""
    folder = Path(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = untrained()
        show_each_latent_alone(pipeline.vae.decoder)
        pictures = two_pictures(pipeline.vae)
        silence, sound = levels(pipeline)
        pipeline.save_pretrained(folder)
        torch.manual_seed(7)
        train_transformer(folder, pipeline, pictures, silence, sound)
    return folder


def untrained() -> "DiffusionPipeline":
    from diffusers import FlowMatchEulerDiscreteScheduler, LTX2Pipeline

    from verl_omni.testing.tiny_videos import ltx2_parts

    parts = ltx2_parts()
    parts["vae"] = made_like(parts["vae"], patch_size=8)
    parts["transformer"] = made_like(
        parts["transformer"],
        attention_head_dim=16,
        cross_attention_dim=32,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=32,
        vae_scale_factors=(2, 16, 16),
    )
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.0, max_shift=0.0)
    return LTX2Pipeline(**parts)


def made_like(module: torch.nn.Module, **but: Any) -> torch.nn.Module:
    """Another of its kind, with random weights of its own."""
    return type(module).from_config(dict(module.config) | but)


@torch.no_grad()
def show_each_latent_alone(decoder: torch.nn.Module) -> None:
    """Nothing moves but where latents change: a latent is two equal frames, whatever is before and after it."""
    for name, layer in decoder.named_modules():
        if isinstance(layer, torch.nn.Conv3d):
            layer.weight[:, :, :-1] = 0  # it is causal: the last of its taps in time is the present
            layer.weight.mul_(2)
            if "upsampler" in name:
                for values in (layer.weight, layer.bias):
                    pairs = values.unflatten(0, (-1, 2, 4))  # time before rows and columns
                    pairs[:, 1] = pairs[:, 0]


@torch.no_grad()
def two_pictures(vae: torch.nn.Module) -> torch.Tensor:
    """Of some random latents and their opposites those that look most different."""
    tried = torch.randn(32, CHANNELS)
    first, second = (vae.decode(way[:, :, None, None, None], None, return_dict=False)[0] for way in (tried, -tried))
    furthest = tried[(first.clamp(-1, 1) - second.clamp(-1, 1)).abs().mean((1, 2, 3, 4)).argmax()]
    return torch.stack([furthest, -furthest])


@torch.no_grad()
def levels(pipeline: "DiffusionPipeline") -> tuple[torch.Tensor, torch.Tensor]:
    """Of some random latents those that sound quietest and loudest."""
    tried, vae = 1.5 * torch.randn(64, CHANNELS), pipeline.audio_vae
    spread = pipeline._denormalize_audio_latents(tried[:, None].expand(-1, 5, -1), vae.latents_mean, vae.latents_std)
    bins = vae.config.mel_bins // pipeline.audio_vae_mel_compression_ratio
    spectrogram = vae.decode(pipeline._unpack_audio_latents(spread, 5, num_mel_bins=bins), return_dict=False)[0]
    wave = pipeline.vocoder(spectrogram)
    level = wave[..., wave.shape[-1] // 3 :].square().mean((1, 2))
    return tried[level.argmin()], tried[level.argmax()]


def begin_with(change: Any) -> Any:
    """The sound's latent that begins with a change. It is the one before: what is heard takes a while to be loud."""
    return 2 * change - 2


def clips(count: int, pictures: torch.Tensor, silence: torch.Tensor, sound: torch.Tensor) -> torch.Tensor:
    """Latents (count, video's and sound's, channels). Which picture comes first is by chance."""
    change = torch.randint(*CHANGES, (count, 1))
    begin = begin_with(torch.randint(*CHANGES, (count, 1)))
    side = (torch.arange(LATENT_FRAMES) >= change).long() ^ torch.randint(2, (count, 1))
    heard = (torch.arange(SOUND_LATENTS) >= begin).long()
    clean = torch.cat([pictures[side], torch.stack([silence, sound])[heard]], dim=1)
    return clean + NOISE * torch.randn_like(clean)


def train_transformer(
    folder: Path, pipeline: "DiffusionPipeline", pictures: torch.Tensor, silence: torch.Tensor, sound: torch.Tensor
) -> None:
    """Flow matching."""
    from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig
    from verl_omni.pipelines.model_base import DiffusionModelBase

    config = DiffusionModelConfig(path=str(folder), pipeline=DiffusionPipelineConfig(**PIPELINE))
    adapter = DiffusionModelBase.get_class(config)
    tokenizers, transformer = {"tokenizer": pipeline.tokenizer}, pipeline.transformer
    with torch.no_grad():
        told = [adapter.encode_prompt(pipeline, adapter.tokenize(tokenizers, prompt, 32), config) for prompt in PROMPTS]
    conditions = {name: torch.cat([one[name] for one in told]) for name in told[0]}
    optimizer = torch.optim.AdamW(transformer.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=TRANSFORMER_STEPS, pct_start=0.1)
    for _ in range(TRANSFORMER_STEPS):
        clean, t = clips(BATCH, pictures, silence, sound), torch.rand(BATCH)
        noise, chosen = torch.randn_like(clean), torch.randint(len(PROMPTS), (BATCH,))
        prompt = {name: value[chosen] for name, value in conditions.items()}
        noisy = torch.lerp(clean, noise, t[:, None, None])
        velocity = adapter.forward(transformer, adapter.model_inputs(transformer, config, noisy, 1000 * t, prompt))
        loss = F.mse_loss(velocity, noise - clean)
        take_step(transformer, optimizer, schedule, loss)
    transformer.save_pretrained(folder / "transformer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))


if __name__ == "__main__":
    main()
