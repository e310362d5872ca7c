"""A rollout engine of somebody's own: one folder, named in `actor_rollout_ref.model.external_lib`.

It draws as diffusers does and answers with a description of the picture: a text, which rewards, files and pages are
given.
"""

import dataclasses

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.rollout import register_rollout
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout
from verl_omni.workers.rollout.server import RolloutServer


class ToyServer(RolloutServer):
    """The same on devices of its own."""

    def load(self, device: torch.device) -> "ToyRollout":
        module = DiffusionModelBase.get_class(self.model_config).load_module(self.model_config, torch.float32)
        return ToyRollout(self.config, self.model_config, module.to(device).eval(), device, torch.float32)


@register_rollout("toy", server=ToyServer)
class ToyRollout(DiffusersRollout):
    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        return "text"

    def draw_batch(self, requests: list) -> list[RolloutOutput]:
        drawn = super().draw_batch(requests)
        texts = [f"<{drawn_one.response.float().mean():.3f} bright>" for drawn_one in drawn]
        return [
            dataclasses.replace(one, response=text, modality="text") for one, text in zip(drawn, texts, strict=True)
        ]
