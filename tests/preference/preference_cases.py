"""Engines and batches that the tests of this folder share; also imported by spawned ranks."""

from typing import Any

import torch

from verl_omni.algorithms.crd import centred
from verl_omni.algorithms.forward_process import anchor_policies, follows_old_policy
from verl_omni.config import (
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionLossConfig,
    DiffusionModelConfig,
    DiffusionPipelineConfig,
    DiffusionRolloutAlgoConfig,
    DiffusionRolloutConfig,
    FSDPConfig,
    OptimizerConfig,
)
from verl_omni.pipelines.drawing import Request
from verl_omni.trainer.diffusion.ordering import deal_units
from verl_omni.utils.padding import pad_and_cat
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine
from verl_omni.workers.engine.noise_levels import NoiseLevels
from verl_omni.workers.engine.teachers import keep_teachers
from verl_omni.workers.losses import LossFunction, build_loss_function
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

SIZE, STEPS, LEVELS, SEQUENCE = 32, 4, 3, 64
PROMPTS = ["a cat", 'a sign that reads "407" on a wall of old bricks', "two dogs"]
# Each with all the anchors that it can have.
LOSSES = {
    "dpo": {"beta": 5.0},
    "diffusion_nft": {"beta": 0.5, "kl_beta": 0.1},
    "awm": {"weighting": "t", "kl_beta": 0.1, "ema_kl_beta": 0.2},
    "dgpo": {"beta": 20.0, "anchor": "reference"},
    "crd": {"beta": 3.0, "temperature": 0.7},
}
# Losses that follow something else than advantages: see `follow`.
FOLLOWING = {"opd_forward": {}, "draft": {"kl_beta": 0.2}}
OPTIM = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0}


def actor_config(loss: str, **extra: Any) -> DiffusionActorConfig:
    settings = (LOSSES | FOLLOWING)[loss] | extra
    return DiffusionActorConfig(
        diffusion_loss=DiffusionLossConfig(loss, clip_ratio=0.2, adv_clip_max=5.0, extra=settings)
    )


def model_config(path: Any, loss: str, lora: bool = False, **pipeline: Any) -> DiffusionModelConfig:
    size = {"height": SIZE, "width": SIZE, "num_inference_steps": STEPS, "max_sequence_length": SEQUENCE}
    return DiffusionModelConfig(
        path=str(path),
        algorithm=loss,
        pipeline=DiffusionPipelineConfig(**(size | {"guidance_scale": 1.0} | pipeline)),
        algo=DiffusionRolloutAlgoConfig(sde_type="ode", noise_level=0.0),
        lora_rank=4 if lora else 0,
        lora_alpha=8,
    )


def make_engine(
    path: Any, loss: str, lora: bool = False, micro_batch: int = 6, **pipeline: Any
) -> DiffusersFSDPEngine:
    model, optim = model_config(path, loss, lora, **pipeline), OptimizerConfig(**OPTIM)
    engine = DiffusersFSDPEngine(model, FSDPConfig(), optim, CheckpointConfig(), NoiseLevels)
    engine.initialize()
    if lora:
        disturb(engine, "lora_B", 0.05)
    engine.micro_batch_size = micro_batch
    engine.rows_per_unit = loss_function(loss).loss_fn.rows_per_unit
    engine.keep_reference()
    if follows_old_policy(loss, actor_config(loss)):
        engine.policies.keep("old")
        disturb(engine, "", 0.01)  # so that the old policy is not the trained one
    return engine


@torch.no_grad()
def disturb(engine: DiffusersFSDPEngine, which: str, scale: float) -> None:
    """Move the weights, in the same way on any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in engine.parameters.items():
        noise = torch.randn(parameter.shape, generator=generator) * scale
        if which not in name:
            continue
        if hasattr(parameter, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            noise = distribute_tensor(noise, parameter.device_mesh, parameter.placements).to_local()
            parameter.to_local().add_(noise)
        else:
            parameter.add_(noise)


def loss_function(loss: str) -> LossFunction:
    return build_loss_function(actor_config(loss))


def follow(engine: DiffusersFSDPEngine, teachers: dict[str, str]) -> None:
    """What a loss of `FOLLOWING` follows: these teachers, or a reward of pixels."""
    if engine.model_config.algorithm == "opd_forward":
        keep_teachers(engine, teachers)
        return
    rollout = rollout_of(engine)
    engine.replay.chained = 2
    engine.replay.told = [0.9, 0.1, 0.7, 0.4, 0.2, 0.6]  # of each image how bright it is to be
    engine.replay.reward_of = rollout.with_reward(
        lambda pixels, wanted: -(pixels.mean(dim=(1, 2, 3)) - torch.tensor(wanted)).square()
    )


def rollout_of(engine: DiffusersFSDPEngine) -> DiffusersRollout:
    return DiffusersRollout(
        DiffusionRolloutConfig(), engine.model_config, engine.module, torch.device("cpu"), torch.float32
    )


def samples(engine: DiffusersFSDPEngine) -> dict[str, torch.Tensor]:
    """Final latents of an ODE rollout and the text features, two of each prompt, as the trainer gets them."""
    config = engine.model_config
    rollout = rollout_of(engine)
    tokenizers = rollout.adapter.load_tokenizers(config)
    requests = [
        Request(rollout.adapter.tokenize(tokenizers, text, SEQUENCE), None, None, {"seed": i, "keep_trajectory": True})
        for i, text in enumerate(text for text in PROMPTS for _ in range(2))
    ]
    with engine.eval_mode():
        outputs = rollout.run_batch(requests)
    rows = [{"clean_latents": o.trajectory["final_latents"]} | o.conditions for o in outputs]
    return {key: pad_and_cat([row[key][None] for row in rows]) for key in rows[0]}


def make_batch(engine: DiffusersFSDPEngine) -> dict[str, torch.Tensor]:
    """Three pairs with rewards of both signs, at noise levels that a pair shares."""
    data = samples(engine)
    generator = torch.Generator().manual_seed(5)
    sigma = 1 - torch.rand(len(PROMPTS), LEVELS, generator=generator)
    seeds = torch.randint(2**62, sigma.shape, generator=generator)
    advantages, group = torch.tensor([1.2, -0.7, 0.4, -2.0, 0.3, -0.2]), torch.arange(len(PROMPTS))
    batch = data | {
        "sigma": sigma.repeat_interleave(2, dim=0),
        "noise_seed": seeds.repeat_interleave(2, dim=0),
        "advantages": advantages,
        "preference": torch.tensor([1.0, -1.0]).repeat(len(PROMPTS)),
    }
    if loss_function(engine.model_config.algorithm).by_group:
        group = group.repeat_interleave(2)
        centre, targets = centred(advantages, group, LOSSES["crd"]["temperature"])
        batch |= {"group": group, "group_share": torch.full((6,), 0.5), "centre": centre, "targets": targets}
    if engine.model_config.algorithm == "opd_forward":
        batch["teacher"] = torch.tensor([0, 1, 0, 0, 1, 0])
    if engine.model_config.algorithm == "draft":
        batch["told"] = torch.arange(len(advantages))
        starts = engine.replay.scheduler.sigmas[: STEPS - 1]  # two steps can follow each
        batch["sigma"] = starts[torch.randint(len(starts), batch["sigma"].shape, generator=generator)]
    return batch


def deal(data: dict[str, torch.Tensor], rows_per_unit: int, ranks: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """The mini-batch (there is one) of a rank, as the trainer deals it."""
    order, share, _ = deal_units(len(data["sigma"]) // rows_per_unit, 1, ranks, group=data.get("group"))
    rows = (order[:, None] * rows_per_unit + torch.arange(rows_per_unit)).reshape(-1)
    dealt = {k: v[rows] for k, v in data.items()}
    dealt["share"] = (share / rows_per_unit).repeat_interleave(rows_per_unit)
    return {k: v.chunk(ranks)[rank] for k, v in dealt.items()}


def update(engine: DiffusersFSDPEngine, data: dict[str, torch.Tensor], loss: str, steps: int = 2) -> list:
    """Optimizer steps over one batch, so that from the second on the policy is not the one that sampled."""
    prepared = engine.before_update(data, anchor_policies(loss, actor_config(loss)))
    with engine.train_mode():
        return [engine.train_batch(prepared, loss_function(loss))["metrics"] for _ in range(steps)]


def weights(engine: DiffusersFSDPEngine) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in engine.parameters.items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys() and one
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def moved(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)
