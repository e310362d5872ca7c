"""The rollout engine on diffusers.

In the training worker it draws with the weights that are trained: there is no copy of the model and nothing to
synchronise, so its log-probabilities are the policy's own. `server.py` beside it gives it a process and weights of its
own.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.perf.memory import names_memory_knobs
from verl_omni.pipelines.drawing import Drawer, Request, equal_parts
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.single_frame_vae import speed_up_single_frames
from verl_omni.utils.responses import Response
from verl_omni.workers.engine.compile.blocks import choose_cache
from verl_omni.workers.engine.compile.clock import clock
from verl_omni.workers.engine.fp8 import Fp8Layers
from verl_omni.workers.engine.lora import base_name
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.batched import BatchedRollout, answer
from verl_omni.workers.rollout.encoders import Encoders
from verl_omni.workers.transfer.weights import checked


class DiffusersRollout(Drawer, BatchedRollout):
    same_arithmetic = True
    precisions = ("fp8",)
    gives_latents = draws_by_blocks = draws_together = holds_8_bits = True
    reads = ("compile_vae", "encoder_offload")

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        model_config: DiffusionModelConfig,
        module: torch.nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        prompt_cache_size: int = 4096,
        decode_batch_size: int = 16,
        prompt_cache_megabytes: int = 8192,
        fp8: Fp8Layers | None = None,
    ):
        """`fp8`: the layers that a server computes in 8 bits, where a request asks for that."""
        pipe = DiffusionModelBase.get_class(model_config).load_pipeline(model_config, device, dtype)
        parts = equal_parts(config.max_num_seqs, decode_batch_size)
        Drawer.__init__(
            self,
            model_config,
            pipe,
            module,
            device,
            autocast,
            config.cfg_in_one_forward,
            prompt_cache_size,
            parts,
            prompt_cache_megabytes,
        )
        BatchedRollout.__init__(self, config, model_config)
        speed_up_single_frames(pipe.vae)
        image_vae_on_gpu = device.type == "cuda" and all(p.ndim <= 4 for p in pipe.vae.parameters())
        if image_vae_on_gpu:
            pipe.vae.to(memory_format=torch.channels_last)
        default = image_vae_on_gpu and not config.vae_tiling  # tiles at the edges have sizes of their own
        self.compiled_vae = default if config.compile_vae is None else config.compile_vae
        if config.vae_tiling:
            pipe.vae.enable_tiling()
        if self.compiled_vae:
            choose_cache()
            clock.count()
            pipe.vae.decoder.compile()
        modules = [m for m in pipe.components.values() if isinstance(m, torch.nn.Module)]
        encoders = [m for m in modules if m is not pipe.vae]
        self.encoders = Encoders(encoders, device, False if device.type == "cpu" else config.encoder_offload)
        self.seconds: dict[str, float] = {}
        self.fp8 = fp8

    @classmethod
    def beside(
        cls, training: TrainingEngine, config: DiffusionRolloutConfig, model_config: DiffusionModelConfig
    ) -> "DiffusersRollout":
        """On the module that is trained: there is nothing to synchronise."""
        return cls(
            config,
            model_config,
            training.module,
            training.device,
            training.dtype,
            autocast=training.autocast,
            **config.engine_kwargs,
        )

    def with_reward(
        self, score: Callable[[torch.Tensor, list[Any]], torch.Tensor]
    ) -> Callable[[torch.Tensor, DiffusionModelConfig, list[Any]], torch.Tensor]:
        """Rewards of latents, of those of pixels and what is told of each: they are decoded as in a rollout, with a
        gradient."""
        self.pipe.vae.requires_grad_(False)

        def reward(latents: torch.Tensor, drawn: DiffusionModelConfig, told: list[Any]) -> torch.Tensor:
            with torch.autocast(self.device.type, enabled=False):  # that of an update: a rollout decodes without
                return score(self.adapter.decode_latents(self.pipe, latents, drawn).float(), told)

        return reward

    @contextlib.contextmanager
    def with_policy(
        self, training: TrainingEngine, policy: str, version: int, precision: str | None = None
    ) -> Iterator[None]:
        self.version = version
        if self.config.gather == "blocks":
            gathered = training.by_blocks()
        else:
            gathered = (training.together if self.config.share_samples else training.whole)(precision)
        with training.eval_mode(), training.policy(policy), gathered:
            yield

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        trained = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        copy_all(weights, trained, "no trained parameter of the rollout's model")
        if self.fp8 is not None:
            self.fp8.hold(fold=True)

    def load_base(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        frozen = {base_name(name): p for name, p in self.module.named_parameters() if not p.requires_grad}
        copy_all(weights, frozen, "no frozen parameter of the rollout's model")

    @names_memory_knobs("rollout")
    def draw_batch(self, requests: list[Request]) -> list[RolloutOutput]:
        self._clock = time.perf_counter()
        in_fp8 = self.fp8 is not None and requests[0].params.get("precision") == "fp8"
        with self.fp8.active() if in_fp8 else contextlib.nullcontext():
            return [answer(sample, self.version) for sample in self.draw(requests)]

    def _before_encoding(self) -> None:
        self.encoders.enter()

    def _done(self, phase: str) -> None:
        """Charge the time since the last call to a phase; waits for the device, three times a batch."""
        if phase == "encode":
            self.encoders.batch_encoded()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._clock
        self._clock = now

    def _decode(self, latents: torch.Tensor, model_config: DiffusionModelConfig) -> Sequence[Response]:
        """A compiled decoder always sees full batches: another size would be compiled anew."""
        rows = len(latents)
        if self.compiled_vae and rows < self.decode_batch_size:
            latents = torch.cat([latents, latents[-1:].expand(self.decode_batch_size - rows, *latents.shape[1:])])
        return super()._decode(latents, model_config)[:rows]

    def forget_component(self, name: str) -> None:
        """Of the pipeline: another does what it is for, and its memory is free."""
        self.encoders.forget(getattr(self.pipe, name))
        self.pipe.register_modules(**{name: None})

    def forget_rollout(self) -> None:
        """The times, and on the device the prompts."""
        self.seconds = {}
        self.forget_device()
        self.encoders.rollout_begins()

    def take_seconds(self) -> dict[str, float]:
        """Time spent in each phase since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds


@torch.no_grad()
def copy_all(weights: Iterable[tuple[str, torch.Tensor]], into: dict[str, torch.nn.Parameter], stranger: str) -> None:
    """Copy weights into the parameters of that name; every one of them, no other."""
    for name, tensor in checked(weights, into, stranger):
        into[name].copy_(tensor.to(into[name].device))  # first, for a GPU rounds faster than a CPU
