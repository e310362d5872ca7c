"""The rollout protocol: what can be asked of any engine that draws samples, and what it answers.

An engine may sit in the training worker, in a process of its own or behind a server; who asks cannot tell.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.utils.responses import Latents, Response, Sound, Video, VideoWithSound, kind_of


@dataclass
class RolloutOutput:
    """One finished request.

    `response` is what was made, of the kind that `modality` names (`verl_omni.utils.responses`): an image (uint8,
    C x H x W), a video (frames of these), a sound, a video with sound or a text. `trajectory` and `conditions` are what
    training needs of it, or `reference` says where that lies. `version` is that of the weights that made it. Tensors
    are left out of what is printed: `asyncio.run` prints its result, unseen, each time it ends.
    """

    response: Response = field(repr=False)
    trajectory: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    conditions: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    modality: str = ""
    version: int = 0
    reference: Any = None

    def __post_init__(self) -> None:
        kind = kind_of(self.response).name
        if self.modality not in ("", kind):
            raise ValueError(f"a rollout engine says that it made a {self.modality}, and its response is a {kind}")
        self.modality = kind

    @property
    def image(self) -> torch.Tensor:
        return self.response.decoded if isinstance(self.response, Latents) else self.response

    def cpu(self) -> "RolloutOutput":
        """Ready to leave the process. A row of a batch is copied: pickling a view would send the whole batch."""
        return dataclasses.replace(
            self,
            response=_own(self.response),
            trajectory={k: own_copy(v) for k, v in self.trajectory.items()},
            conditions={k: own_copy(v) for k, v in self.conditions.items()},
        )


def _own(response: "Response | None") -> "Response | None":
    if isinstance(response, Sound):
        return dataclasses.replace(response, samples=own_copy(response.samples))
    if isinstance(response, Video):
        return dataclasses.replace(response, frames=own_copy(response.frames))
    if isinstance(response, VideoWithSound):
        return dataclasses.replace(response, frames=own_copy(response.frames), sound=_own(response.sound))
    if isinstance(response, Latents):
        return Latents(own_copy(response.values), _own(response.decoded))
    return own_copy(response) if isinstance(response, torch.Tensor) else response


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().clone()


class RolloutEngine(ABC):
    """Draws samples with weights of a known version."""

    #: whether it computes a step as training does, operation by operation, so that in float32 its log-probabilities are
    #: training's own to the last bit
    same_arithmetic: ClassVar[bool] = False
    #: other than that of training, that it can be asked to draw in: values of `actor_rollout_ref.rollout.precision`
    precisions: ClassVar[tuple[str, ...]] = ()
    #: whether it gives the latents of a sample where it is asked for them (`latents` of a request, `reward.input`)
    gives_latents: ClassVar[bool] = False
    #: why it has no others, after its name
    why_no_precision: ClassVar[str] = "does not say that it can draw so (`precisions`)"
    #: whether it holds frozen weights in 8 bits where training does (`actor_rollout_ref.model.base_precision`)
    holds_8_bits: ClassVar[bool] = False
    #: settings of `actor_rollout_ref.rollout` that only some engines read, and it does: others are refused
    reads: ClassVar[tuple[str, ...]] = ()
    #: of the weights that the next request is drawn with
    version: int = 0

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        """The kind of its responses with this model, before anything is loaded."""
        return DiffusionModelBase.get_class(model_config).makes(model_config)

    @classmethod
    def receives(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.dtype | None:
        """What trained weights are rounded to before they are sent to it, where training computes in `dtype`: the dtype
        that it holds them in. None: as training holds them."""
        return None

    @classmethod  # noqa: B027  (most have nothing to refuse)
    def check(cls, settings: DiffusionTrainerConfig) -> None:
        """Refuse, in one line, what it cannot draw with. The driver asks it before anything starts."""

    @abstractmethod
    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        negative_prompt_ids: list[int] | None = None,
        priority: int = 0,
    ) -> RolloutOutput:
        """One sample for one tokenized prompt. Concurrent calls may share forwards. Who no longer wants the answer
        cancels the call: what has not begun is not drawn, and a batch that nobody waits for ends before its next step.

        `priority` above 0 is for guests, who are not to hold up a run: their requests say a `position` in a burst of
        their own, and others have every second batch.
        """

    @abstractmethod
    def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        version: int,
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
    ) -> None:
        """Take new weights, all that are trained, by the training module's names. Requests that run end on the old.

        With LoRA that is the adapter, of which `peft_config` says what peft knows. Its frozen weights are those of the
        model's folder, unless others came before it, with `peft_config` and `base_sync_done` false.
        """

    @abstractmethod
    def pause(self) -> None:
        """Begin no further request; returns when none is running."""

    @abstractmethod
    def resume(self) -> None:
        """Take requests again."""

    @abstractmethod
    def stop(self) -> None:
        """Give everything back. Waiting requests fail."""
