"""The training engine, as workers and rollout engines see it. They ask for what is here, and for nothing else."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

import verl_omni.utils.cpu_platform  # noqa: F401  (verl asks for a platform when it is imported)

with warnings.catch_warnings():  # verl announces every engine whose package is not installed
    warnings.simplefilter("ignore")
    from verl.workers.engine.base import BaseEngine

from verl_omni.config import (
    CheckpointConfig,
    DiffusionActorConfig,
    DiffusionModelConfig,
    EngineConfig,
    OptimizerConfig,
)
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.workers.engine.fp8 import Fp8Layers
from verl_omni.workers.engine.policies import Policies
from verl_omni.workers.engine.replay import Batch, Replay
from verl_omni.workers.host_memory import HostMemory
from verl_omni.workers.layout import Layout

# Under this type of model verl's registry knows the engines that train diffusion models.
MODEL_TYPE = "diffusion_model"
LossFunction = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], Any]


class TrainingEngine(BaseEngine, ABC):
    """Holds the transformer and updates it. `base.py` has what is the same for all engines."""

    model_config: DiffusionModelConfig
    #: this engine's own settings, and what every engine reads
    engine_config: Any
    common: EngineConfig
    optimizer_config: OptimizerConfig
    checkpoint_config: CheckpointConfig
    adapter: type[DiffusionModelBase]
    layout: Layout
    device: torch.device
    #: of the computation, and of the weights
    dtype: torch.dtype
    model_dtype: torch.dtype
    #: what is trained: the module, the diffusers models in it, and the parameters with a gradient
    module: torch.nn.Module
    parts: dict[str, torch.nn.Module]
    parameters: dict[str, torch.nn.Parameter]
    policies: Policies
    #: frozen policies with a module of their own, each in an engine that is only asked
    models: dict[str, "TrainingEngine"]
    #: the folder of other weights than the model's own
    weights_from: str | None
    #: how samples become forwards, from `initialize` on
    replay: Replay
    replay_class: type[Replay]
    optimizer: torch.optim.Optimizer
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler
    #: what is offloaded there
    host: HostMemory
    #: pairs in one forward, of which so many belong together
    micro_batch_size: int
    rows_per_unit: int
    #: whether that number is found by a trial; until then it is 0, which stands for one unit
    finds_micro_batch: bool
    #: of what a checkpoint holds, counted
    changes: int
    ema_decay: float
    #: the layers that can be computed in 8 bits; asked for the first time, it says what cannot
    fp8: Fp8Layers

    # ---- what one engine says of itself, in a folder of its own ---------------------------------------

    #: whether it can draw without holding the whole model: see `by_blocks`
    draws_by_blocks: ClassVar[bool] = False
    #: whether ranks that share samples in training can draw them so: see `together`
    draws_together: ClassVar[bool] = False
    #: whether a rank alone can compile ahead what several compute: see `as_spread`
    compiles_ahead: ClassVar[bool] = False
    #: whether it can hold frozen weights in 8 bits (`model.base_precision`)
    holds_8_bits: ClassVar[bool] = False
    #: what of it a forecast of memory and seconds does not know; None: nothing
    not_counted: ClassVar[str | None] = "what this training engine does in another way than FSDP2"

    @classmethod
    def settings(cls, actor: DiffusionActorConfig) -> Any:
        """Where in the actor's configuration this engine's own settings are, beside `actor.engine`."""
        raise NotImplementedError

    @classmethod
    def lay_out(cls, engine_config: Any, world: int) -> Layout:
        """How so many ranks are divided, or one line that says why they cannot be. The driver asks it too."""
        raise NotImplementedError

    @classmethod
    def check(
        cls,
        actor: DiffusionActorConfig,
        adapter: type[DiffusionModelBase],
        parts: Callable[[], Sequence[torch.nn.Module]],
    ) -> None:
        """Refuse, in one line, what it cannot train; `parts` builds the trained modules without their weights. The
        driver asks it before anything starts."""

    @classmethod
    def shared_by(cls, engine_config: Any) -> tuple[int, str]:
        """How many ranks compute one sample together, and the setting that says so. The driver asks it too."""
        return 1, ""

    @classmethod
    def cuts_samples(cls, engine_config: Any) -> bool:
        return cls.shared_by(engine_config)[0] > 1

    @classmethod
    def frees_gathered(cls, engine_config: Any) -> bool:
        """Whether weights that were gathered for a forward are freed after it. The driver asks it too."""
        return False

    @property
    def shares_samples(self) -> bool:
        return self.cuts_samples(self.engine_config)

    def equip(self) -> None:
        """Change how the parts compute, before they are compiled and spread."""

    def spread(self) -> None:
        """Lay the parts over the ranks, as `layout` says. Their weights are on the meta device, to be filled after."""
        raise NotImplementedError

    def gather(self) -> None:
        """Every rank holds the whole weights until `release`."""

    def release(self) -> None:
        """Each rank holds its own share again."""

    def settle(self) -> None:
        """Forget gathered weights: what a rank holds is about to be read or written."""

    def begin_micro_batch(self, last: bool) -> None:
        """Gradients are summed over ranks in the last micro-batch's backward, those that are large in every one's."""

    def sum_of_shards(self, squares: torch.Tensor) -> torch.Tensor:
        """Of all ranks that hold a share of the same weights."""
        return squares

    # ---- what workers ask -----------------------------------------------------------------------------

    @abstractmethod
    def initialize(self) -> None:
        """Build the module, spread it, fill it; then the optimizer and the learning-rate schedule."""

    @abstractmethod
    def keep_reference(self, offload: bool = False, path: str | None = None) -> None:
        """Full fine-tuning: remember the starting weights. With LoRA the reference is the model without adapters.

        `path` is the folder of another reference: of an adapter, or of a whole model.
        """

    @abstractmethod
    def keep_ema(self, decay: float) -> None:
        """A moving average of the trained weights, moved after every optimizer step."""

    @abstractmethod
    def keep_old(self) -> None:
        """The policy that samples, where it follows the trained one at a distance."""

    @abstractmethod
    def move_old(self, decay: float) -> None:
        """old <- decay * old + (1 - decay) * current."""

    @abstractmethod
    def remember_policy(self, name: str, version: int, most: int) -> None:
        """The policy of that name, as it is now, under `policy_at(name, version)`, beside the `most` - 1 before it."""

    @abstractmethod
    def policy(self, name: str) -> AbstractContextManager[None]:
        """Forward passes inside use the policy of that name: current, reference, ema, old."""

    @abstractmethod
    def knows(self, name: str) -> bool:
        """Whether a policy of that name is kept."""

    @abstractmethod
    def whole(self, precision: str | None = None) -> AbstractContextManager[None]:
        """Every rank holds the whole model inside, ready to generate; no rank waits for another.

        `precision` is fp8 where layers are to be computed in 8 bits, null for `dtype`.
        """

    def by_blocks(self) -> AbstractContextManager[None]:
        """Ready to generate too, where `draws_by_blocks`: a forward gathers one block after another from all ranks."""
        raise NotImplementedError

    def together(self, precision: str | None = None) -> AbstractContextManager[None]:
        """Like `whole`, where `draws_together`: of the ranks that share samples the first draws, the others compute
        their share of its forwards."""
        raise NotImplementedError

    @abstractmethod
    def in_precision(self, precision: str | None) -> AbstractContextManager[None]:
        """Passes without a gradient inside are computed in this precision, by the policy that is swapped in."""

    @abstractmethod
    def autocast(self) -> AbstractContextManager:
        """Compute in `dtype`, on one rank and on many alike."""

    @property
    @abstractmethod
    def rounds_like_rollout(self) -> bool:
        """Whether training reproduces the rollout's log-probabilities to 1e-6."""

    @abstractmethod
    def before_update(self, data: Batch, anchors: Mapping[str, str], versions: Sequence[int] = ()) -> Batch:
        """Add to a mini-batch what has to be computed before the first optimizer step."""

    @abstractmethod
    def train_batch(
        self,
        data: Batch,
        loss_function: LossFunction,
        before_step: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, Any]:
        """One optimizer step. `before_step` sees the metrics, the same on every rank, and may raise."""

    @abstractmethod
    def infer_batch(
        self,
        data: Batch,
        loss_function: LossFunction | None = None,
        training_graph: bool = False,
        micro_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Forward passes alone.

        `training_graph` runs them as training would, for kernels that round differently without a gradient.
        """

    @abstractmethod
    def get_per_tensor_param(
        self, base_sync_done: bool = True, dtype: torch.dtype | None = None, **kwargs
    ) -> tuple[Iterator[tuple[str, torch.Tensor]], dict[str, Any] | None]:
        """(weights by the module's own names, each gathered from all ranks; with LoRA, what peft knows of the adapter).

        These are the trained weights: of a LoRA the adapter, unless the frozen weights below it have to go first. Each
        rank rounds its share to `dtype` before it is gathered.
        """

    @abstractmethod
    def checkpoint_written(self, wait: bool) -> bool:
        """Whether all that `save_checkpoint` was asked for is on the disk: with `async_save` it goes on after it."""

    @abstractmethod
    def give_up_checkpoint(self) -> None:
        """Wait until nothing is written any more, of a checkpoint that has failed here or elsewhere."""

    @abstractmethod
    def checkpoint_bytes(self) -> int:
        """The size of what `save_checkpoint` would write now."""
