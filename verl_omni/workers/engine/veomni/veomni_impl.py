"""VeOmni: the same transformers, spread over ranks and sharing tokens by VeOmni's own code."""

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable, Sequence

import torch

from verl_omni.config import DiffusionActorConfig, VeOmniConfig
from verl_omni.config.knob import typed
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.base import MODEL_TYPE
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine, divided
from verl_omni.workers.layout import Layout

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import EngineRegistry

SHARE = "actor_rollout_ref.actor.veomni_config.ulysses_parallel_size"
INSTALL = "make veomni (a CPU), or pip install 'verl-omni[veomni]' in an environment of its own"
# The transformers that VeOmni has a forward for, by the names that diffusers gives them.
TRANSFORMERS = ("QwenImageTransformer2DModel", "WanTransformer3DModel")


def installed() -> bool:
    spec = importlib.util.find_spec("veomni")
    return spec is not None and spec.origin is not None


def check_transformer(part: torch.nn.Module) -> None:
    if type(part).__name__ not in TRANSFORMERS:
        raise ValueError(
            f"actor_rollout_ref.actor.strategy=veomni: VeOmni has no {type(part).__name__}, only "
            f"{' and '.join(TRANSFORMERS)}; set strategy=fsdp2"
        )


@EngineRegistry.register(model_type=MODEL_TYPE, backend="veomni", device=["cpu", "cuda"])
class VeOmniEngine(DiffusersFSDPEngine):
    """What VeOmni makes of a module is FSDP2's: how it is gathered, and when gradients are summed, is as there."""

    draws_by_blocks = False  # it gathers blocks ahead of their turn
    draws_together = False
    holds_8_bits = False  # it was not tried
    compiles_ahead = False  # its attention asks for ranks, and a process that compiles ahead has none
    not_counted = "VeOmni's own kernels, and other ways to share out"

    @classmethod
    def settings(cls, actor: DiffusionActorConfig) -> VeOmniConfig:
        return actor.veomni_config

    @classmethod
    def lay_out(cls, engine_config: VeOmniConfig, world: int) -> Layout:
        if not installed():
            raise ValueError(f"actor_rollout_ref.actor.strategy=veomni: veomni is not installed here; type {INSTALL}")
        return divided(
            world,
            ("actor_rollout_ref.actor.veomni_config.fsdp_size", engine_config.fsdp_size),
            (SHARE, engine_config.ulysses_parallel_size),
        )

    @classmethod
    def check(
        cls,
        actor: DiffusionActorConfig,
        adapter: type[DiffusionModelBase],
        parts: Callable[[], Sequence[torch.nn.Module]],
    ) -> None:
        """VeOmni has a forward for the model, and no setting of FSDP2 is meant."""
        for field in dataclasses.fields(actor.fsdp_config):
            if (value := getattr(actor.fsdp_config, field.name)) != field.default:
                raise ValueError(
                    f"actor_rollout_ref.actor.fsdp_config.{field.name}={typed(value)} has no effect with "
                    "actor_rollout_ref.actor.strategy=veomni, whose settings are in "
                    "actor_rollout_ref.actor.veomni_config"
                )
        for part in parts():
            check_transformer(part)

    @classmethod
    def shared_by(cls, engine_config: VeOmniConfig) -> tuple[int, str]:
        ranks = engine_config.ulysses_parallel_size
        return ranks, f"{SHARE}={ranks}"

    @classmethod
    def frees_gathered(cls, engine_config: VeOmniConfig) -> bool:
        return engine_config.enable_full_shard

    def equip(self) -> None:
        from verl_omni.workers.engine.veomni.models import compute_with_veomni
        from verl_omni.workers.engine.veomni.state import SharedState

        self.sequence = SharedState(self.layout, self.device.type)
        for part in self.parts.values():
            check_transformer(part)
            compute_with_veomni(part)

    def spread(self) -> None:
        from veomni.arguments import MixedPrecisionConfig
        from veomni.distributed.torch_parallelize import parallelize_model_fsdp2

        self.mesh = self.sequence.shared.fsdp_mesh
        # Inputs stay as they are, and autocast chooses: FSDP would round a timestep of 857.69 to 856 in bfloat16.
        precision = MixedPrecisionConfig(
            param_dtype=str(self.dtype).removeprefix("torch."), reduce_dtype="float32", cast_forward_inputs=False
        )
        for part in self.parts.values():
            parallelize_model_fsdp2(
                part,
                mixed_precision=precision,
                enable_reshard_after_forward=self.reshards,
                init_device="meta",
                should_skip_hf_weight_load=True,  # each rank reads its own part, after this
            )
