"""A training engine of somebody's own: one folder, named in `actor_rollout_ref.model.external_lib`."""

from verl.workers.engine.base import EngineRegistry

from verl_omni.config import DiffusionActorConfig, FSDPConfig
from verl_omni.workers.engine.base import MODEL_TYPE
from verl_omni.workers.engine.fsdp.diffusers_impl import DiffusersFSDPEngine
from verl_omni.workers.layout import Layout


@EngineRegistry.register(model_type=MODEL_TYPE, backend="toy", device=["cpu", "cuda"])
class ToyEngine(DiffusersFSDPEngine):
    """All ranks work on the same rows. Its module knows nothing of it: each computes every sample whole."""

    @classmethod
    def settings(cls, actor: DiffusionActorConfig) -> FSDPConfig:
        return actor.fsdp_config

    @classmethod
    def lay_out(cls, engine_config: FSDPConfig, world: int) -> Layout:
        return Layout(sequence=world)
