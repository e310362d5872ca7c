"""Engines, rollouts and losses that the tests of this folder share; also imported by spawned ranks."""

from typing import Any

import torch

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
    VeOmniConfig,
)
from verl_omni.pipelines.drawing import Request
from verl_omni.utils.padding import pad_and_cat
from verl_omni.workers.engine.fsdp.diffusers_impl import PPODiffusersFSDPEngine
from verl_omni.workers.engine.registry import engine_class
from verl_omni.workers.losses import LossFunction, build_loss_function
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

STEPS, SIZE, NOISE = 4, 32, 0.7
PROMPTS = ["a cat", 'a sign that reads "407", on a wall of old red bricks in the evening light']
NEGATIVE = "blurry"
SEQUENCE = 128

# A large epsilon: with AdamW's own, an element whose gradient is rounding noise would move by a whole learning rate.
OPTIM = {"lr": 2e-3, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 0.1}


def model_config(path: str, sde_type: str = "sde", cfg: bool = False, lora: bool = False, **model: Any):
    return DiffusionModelConfig(
        path=str(path),
        pipeline=DiffusionPipelineConfig(
            height=SIZE,
            width=SIZE,
            num_inference_steps=STEPS,
            true_cfg_scale=4.0 if cfg else 1.0,
            max_sequence_length=SEQUENCE,
        ),
        algo=DiffusionRolloutAlgoConfig(sde_type=sde_type, noise_level=NOISE),
        lora_rank=4 if lora else 0,
        lora_alpha=8,
        **model,
    )


def make_engine(
    config: DiffusionModelConfig, optim: dict | None = None, strategy: str = "fsdp2", **settings: Any
) -> PPODiffusersFSDPEngine:
    """`settings` are the engine's own, and those that all have."""
    own = {"fsdp2": FSDPConfig, "veomni": VeOmniConfig}[strategy](**settings)
    engine = engine_class(strategy)(config, own, OptimizerConfig(**(OPTIM | (optim or {}))), CheckpointConfig())
    engine.initialize()
    if config.lora_rank:
        disturb(engine)
    return engine


@torch.no_grad()
def disturb(engine: PPODiffusersFSDPEngine, scale: float = 0.05) -> None:
    """Fresh LoRA weights change nothing: give them values, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in engine.parameters.items():
        noise = torch.randn(parameter.shape, generator=generator) * scale
        if "lora_B" in name:
            set_weight(parameter, noise)


@torch.no_grad()
def set_weight(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    if hasattr(parameter, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value, parameter.device_mesh, parameter.placements).to_local()
        parameter.to_local().copy_(value)
    else:
        parameter.copy_(value)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def weights(engine: PPODiffusersFSDPEngine) -> dict[str, torch.Tensor]:
    return {name: whole(parameter) for name, parameter in engine.parameters.items()}


def gradients(engine: PPODiffusersFSDPEngine) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad) for n, p in engine.parameters.items() if p.grad is not None}


def make_rollout(engine: PPODiffusersFSDPEngine, **settings: Any) -> DiffusersRollout:
    config = DiffusionRolloutConfig(**settings)
    return DiffusersRollout(config, engine.model_config, engine.module, torch.device("cpu"), torch.float32)


def requests(rollout: DiffusersRollout, prompts: list[str], first_seed: int = 0, **params: Any) -> list[Request]:
    tokenizers = rollout.adapter.load_tokenizers(rollout.model_config)
    negative = rollout.adapter.tokenize(tokenizers, NEGATIVE, SEQUENCE)
    return [
        Request(
            rollout.adapter.tokenize(tokenizers, text, SEQUENCE), negative, None, {"seed": first_seed + i} | params
        )
        for i, text in enumerate(prompts)
    ]


def roll_out(
    engine: PPODiffusersFSDPEngine,
    per_prompt: int = 2,
    texts: list[str] = PROMPTS,
    rollout: DiffusersRollout | None = None,
    **params: Any,
) -> dict[str, torch.Tensor]:
    """A training batch: trajectories of the engine's own policy, with advantages that have both signs."""
    rollout = make_rollout(engine) if rollout is None else rollout
    prompts = [text for text in texts for _ in range(per_prompt)]
    with engine.eval_mode():
        params = {"keep_trajectory": True, "sde_window": (0, STEPS - 1)} | params
        outputs = rollout.run_batch(requests(rollout, prompts, **params))
    rows = [output.trajectory | output.conditions for output in outputs]
    data = {key: pad_and_cat([row[key][None] for row in rows]) for key in rows[0]}
    data["old_log_probs"] = data.pop("rollout_log_probs")
    advantages = torch.randn(len(rows), generator=torch.Generator().manual_seed(3))
    data["advantages"] = advantages[:, None].expand(-1, STEPS - 1).contiguous()
    return data


def part(data: dict[str, torch.Tensor], rows: slice | list[int]) -> dict[str, torch.Tensor]:
    return {key: value[rows] for key, value in data.items()}


def loss_function(kl: float = 0.0, clip: float = 0.025, name: str = "flow_grpo") -> LossFunction:
    return build_loss_function(
        DiffusionActorConfig(
            use_kl_loss=kl > 0, kl_loss_coef=kl, diffusion_loss=DiffusionLossConfig(name, clip_ratio=clip)
        )
    )


def add_reference(engine: PPODiffusersFSDPEngine, data: dict[str, torch.Tensor]) -> None:
    with engine.eval_mode(), engine.policy("reference"):
        mean = engine.infer_batch(data)["model_output"]["prev_sample_mean"]
    data["ref_prev_sample_mean"] = mean.unflatten(0, data["all_timesteps"].shape)


def update(engine: PPODiffusersFSDPEngine, data: dict[str, torch.Tensor], loss: LossFunction, steps: int = 2) -> list:
    """Optimizer steps over the same batch, so that from the second on the ratio is not 1."""
    with engine.train_mode():
        return [engine.train_batch(data, loss)["metrics"] for _ in range(steps)]


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys() and one
    for name in one:
        torch.testing.assert_close(
            one[name], other[name].to(one[name].dtype), atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def moved(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest change of any weight: a test that compares updates has to see some."""
    return max((one[name] - other[name]).abs().max().item() for name in one)
