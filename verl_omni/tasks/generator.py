"""A small Qwen-Image for a task, trained from scratch on pictures that the task draws, until it scores as it should.

All parts are diffusers' and transformers' own classes; the text encoder keeps its random weights, which are enough to
tell words apart. Training ends early on purpose: what the generator cannot draw yet is left for reinforcement learning.
"""

import contextlib
import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from verl_omni.pipelines.single_frame_vae import speed_up_single_frames
from verl_omni.quickstart.checkpoint import encode, load_pipeline, take_step
from verl_omni.quickstart.made import made_whole, write_recipe
from verl_omni.testing.tiny_random import QWEN_IMAGE_PREFIX
from verl_omni.testing.tiny_text import qwen_text_encoder, qwen_tokenizer
from verl_omni.workers.engine.compile.blocks import compile_blocks

if TYPE_CHECKING:
    from diffusers import QwenImagePipeline

LATENT_CHANNELS = 8
CLEAR = 0.97  # what drawn pictures have to score through the VAE
HEAD = 32
COOLING = 0.4  # of the time, at its end: the learning rate goes to 0
# Around every step: who shares the device with others may have to wait for a turn.
Turn = Callable[[], contextlib.AbstractContextManager]


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a generator is, and how long it is trained. Batches are large: a GPU waits for its kernels' starts."""

    layers: int = 5
    heads: int = 6
    text_width: int = 128
    vae_width: int = 16
    pictures: int = 100_000
    vae_steps: int = 900
    vae_batch: int = 256
    vae_crop: int = 32
    vae_lr: float = 1e-3
    vae_rounds: int = 3
    batch: int = 1024
    lr: float = 1e-3
    warmup: int = 100
    average: float = 0.999
    steps: int = 100_000
    score_every: int = 1000
    score_pictures: int = 192


# To try the script on a CPU: it learns next to nothing.
SMALL = Size(1, 2, 32, 4, 64, 10, 4, 32, 5e-3, 1, 8, 1e-3, 2, 0.5, 4, 2, 6)


def size_of(task: ModuleType) -> Size:
    return Size(**getattr(task, "GENERATOR", {}))


def make_generator(
    task: ModuleType,
    out: Path,
    size: Size,
    seconds: float,
    target: float,
    seed: int = 0,
    begun: Path | None = None,
    turn: Turn = contextlib.nullcontext,
) -> Path:
    """Train one into the folder `out`, until it scores `target` on prompts to train with or `seconds` have passed.

    The seconds are the transformer's, without its waits for a turn; the VAE is trained before, as long as it takes.

    `begun` is one that was not trained long enough: this one goes on from its weights, and keeps its VAE.
    """
    if begun is not None and not (begun / "model_index.json").is_file():
        raise NotADirectoryError(f"{begun} holds no model: expected a folder that this command has made")
    with made_whole(out) as folder:
        with rounded_products():
            pipeline, reached = trained(task, size, seconds, target, seed, begun, turn)
        for part in pipeline.components.values():
            if isinstance(part, torch.nn.Module):  # the pipeline's own `to` warns that it cannot compute so
                part.to("cpu", torch.float16)
        pipeline.save_pretrained(folder)
        made = {"task": task.NAME, "seed": seed, **dataclasses.asdict(size), "target": target, **reached}
        write_recipe(folder, made)
    return out


def write_rows(task: ModuleType, folder: Path) -> None:
    """The prompts of a task, to train with and held out."""
    for split in ("train", "val"):
        lines = [json.dumps(row) + "\n" for row in task.rows(split)]
        (folder / f"{split}.jsonl").write_text("".join(lines))


@contextlib.contextmanager
def rounded_products() -> Iterator[None]:
    """Of float32 on a GPU, as the process has it again afterwards."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def trained(
    task: ModuleType, size: Size, seconds: float, target: float, seed: int, begun: Path | None, turn: Turn
) -> tuple["QwenImagePipeline", dict[str, float]]:
    """(the pipeline, how far it has come)."""
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    pictures, asked = task.training_pictures(min(size.pictures, task.PICTURES), seed, device)
    pipeline = (untrained(task, size) if begun is None else load_pipeline(begun)).to(device)
    images = pictures[:, :, None].float().div_(127.5).sub_(1)  # in place: they are gigabytes
    del pictures
    speed_up_single_frames(pipeline.vae)
    for _ in range(size.vae_rounds if begun is None else 0):
        train_vae(pipeline, images, size, turn)
        with turn():
            kept = fidelity(pipeline, task, images[: size.score_pictures], [truth for _, truth in asked])
        print(f"{time.monotonic() - began:.0f} s: through the VAE what is drawn scores {kept:.3f}", flush=True)
        if kept >= CLEAR:
            break
    with turn():
        latents = encode(pipeline.vae, images)
    del images
    drawing_began, waited = time.monotonic(), 0.0

    reached: dict[str, float] = {}

    @contextlib.contextmanager
    def own_turn() -> Iterator[None]:
        nonlocal waited
        asked_for_it = time.monotonic()
        with turn():
            waited += time.monotonic() - asked_for_it
            yield

    def left() -> float:
        return max(0.0, 1 - (time.monotonic() - drawing_began - waited) / seconds)

    def enough(step: int, loss: float) -> bool:
        with own_turn():
            counted, graded = score(pipeline, task, size.score_pictures, seed)
        reached.update(step=step, score=counted, graded=graded, loss=loss)
        told = time.monotonic() - began
        print(f"{told:.0f} s: step {step}, loss {loss:.3f}, score {counted:.3f}, graded {graded:.3f}", flush=True)
        return counted >= target or not left()

    train_transformer(pipeline, latents, [prompt for prompt, _ in asked], size, left, enough, own_turn)
    return pipeline, reached


def untrained(task: ModuleType, size: Size) -> "QwenImagePipeline":
    from diffusers import (
        AutoencoderKLQwenImage,
        FlowMatchEulerDiscreteScheduler,
        QwenImagePipeline,
        QwenImageTransformer2DModel,
    )

    tokenizer = qwen_tokenizer([QWEN_IMAGE_PREFIX, "assistant\n", *task.known_texts()])
    vae = AutoencoderKLQwenImage(
        base_dim=size.vae_width,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, False],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    transformer = QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=size.layers,
        num_attention_heads=size.heads,
        attention_head_dim=HEAD,
        joint_attention_dim=size.text_width,
        axes_dims_rope=(8, 12, 12),
    )
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False)
    return QwenImagePipeline(scheduler, vae, qwen_text_encoder(tokenizer, size.text_width), tokenizer, transformer)


def train_vae(pipeline: "QwenImagePipeline", images: torch.Tensor, size: Size, turn: Turn) -> None:
    """To give back what it is given. Noise is small beside the latents, which would drown in more of it at first.

    It sees parts of pictures: convolutions learn the same from them, and most of a picture is ground.
    """
    vae = pipeline.vae
    optimizer = torch.optim.AdamW(vae.parameters(), size.vae_lr, weight_decay=0.0, fused=images.is_cuda)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, size.vae_lr, total_steps=size.vae_steps, pct_start=0.15)
    for _ in range(size.vae_steps):
        with turn():
            target = cut(images[torch.randint(len(images), (size.vae_batch,), device=images.device)], size.vae_crop)
            latents = vae.encode(target).latent_dist.mean
            noise = 0.1 * latents.std().detach() * torch.randn_like(latents)
            take_step(vae, optimizer, schedule, F.mse_loss(vae.decode(latents + noise).sample, target))


def cut(images: torch.Tensor, side: int) -> torch.Tensor:
    """A square part of each, at the same place, drawn at random; what is smaller stays whole."""
    top, left = (int(torch.randint(max(1, length - side + 1), ())) for length in images.shape[-2:])
    return images[..., top : top + side, left : left + side]


def train_transformer(
    pipeline: "QwenImagePipeline",
    latents: torch.Tensor,
    prompts: list[str],
    size: Size,
    left: Callable[[], float],
    enough: Callable[[int, float], bool],
    turn: Turn,
) -> None:
    """Flow matching: from `x_t = (1 - t) x + t noise` predict `noise - x`, t uniform in [0, 1].

    What is scored and kept is a moving average of the weights, which draws better than they do at any time. On a GPU
    the blocks are compiled, and compute in bfloat16. `left` is the share of the time that is left.
    """
    transformer, device = pipeline.transformer, latents.device
    on_gpu = device.type == "cuda"
    average = copy.deepcopy(transformer).requires_grad_(False)
    if on_gpu:
        compile_blocks({"transformer": transformer})
    texts = list(dict.fromkeys(prompts))
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(texts)
    number = {text: i for i, text in enumerate(texts)}
    text_of = torch.tensor([number[prompt] for prompt in prompts], device=device)
    channels, _, height, width = latents.shape[1:]
    clean = pipeline._pack_latents(latents, len(latents), channels, height, width)
    shapes = [[(1, height // 2, width // 2)]] * size.batch
    optimizer = torch.optim.AdamW(transformer.parameters(), size.lr, fused=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / size.warmup, left() / COOLING))
    losses: list[torch.Tensor] = []  # since the last score
    for step in range(1, size.steps + 1):
        with turn():
            chosen = torch.randint(len(clean), (size.batch,), device=device)
            x, text = clean[chosen], text_of[chosen]
            # A t that bfloat16 can hold, as the transformer would round it; the times of a rollout are such.
            noise, t = torch.randn_like(x), torch.rand(size.batch, device=device).bfloat16().float()
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                velocity = transformer(
                    hidden_states=torch.lerp(x, noise, t[:, None, None]),
                    timestep=t,
                    encoder_hidden_states=embeds[text],
                    encoder_hidden_states_mask=None if mask is None else mask[text],
                    img_shapes=shapes,
                    return_dict=False,
                )[0]
            loss = F.mse_loss(velocity.float(), noise - x)
            take_step(transformer, optimizer, schedule, loss)
            losses.append(loss.detach())
            follow(average, transformer, min(size.average, step / (step + 9)))
        if step % size.score_every == 0 or step == size.steps or not left():
            pipeline.register_modules(transformer=average)
            if enough(step, torch.stack(losses).mean().item()):
                return
            losses.clear()


@torch.no_grad()
def follow(average: torch.nn.Module, module: torch.nn.Module, decay: float) -> None:
    """average <- decay * average + (1 - decay) * module."""
    torch._foreach_lerp_(list(average.parameters()), list(module.parameters()), 1 - decay)


@torch.no_grad()
def fidelity(pipeline: "QwenImagePipeline", task: ModuleType, images: torch.Tensor, ground_truths: list[str]) -> float:
    """The mean score of drawn pictures that went through the VAE: no generator can score more with it."""
    decoded = pipeline.vae.decode(pipeline.vae.encode(images).latent_dist.mean).sample[:, :, 0]
    pictures = list((decoded / 2 + 0.5).clamp(0, 1).cpu())
    answers = task.score(pictures, ground_truths[: len(pictures)])
    return fmean(answer[task.COUNTED] for answer in answers)


@torch.no_grad()
def score(pipeline: "QwenImagePipeline", task: ModuleType, count: int, seed: int) -> tuple[float, float]:
    """Of pictures of prompts to train with, each once: the mean of what is counted, and of the graded score."""
    rows = task.rows("train")[:: max(1, len(task.rows("train")) // count)][:count]
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(
        [row["prompt"] for row in rows],
        height=task.HEIGHT,
        width=task.WIDTH,
        num_inference_steps=task.NUM_INFERENCE_STEPS,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="pt",
    ).images
    answers = task.score(list(pictures.cpu()), [row["reward_model"]["ground_truth"] for row in rows])
    counted, graded = (fmean(answer[name] for answer in answers) for name in (task.COUNTED, "score"))
    return counted, graded
