"""The rollout engine on diffusers.

In the training worker it draws with the weights that are trained: there is no copy of the model and nothing to
synchronise, so its log-probabilities are the policy's own. `diffusers_server.py` gives it a process and weights of its
own.
"""

import collections
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig, DiffusionRolloutConfig
from verl_omni.perf.memory import names_memory_knobs
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.sampling import denoise
from verl_omni.pipelines.single_frame_vae import speed_up_single_frames
from verl_omni.utils.batcher import Batcher
from verl_omni.workers.rollout.base import RolloutEngine, RolloutOutput, pad_and_cat
from verl_omni.workers.rollout.encoders import Encoders

PIPELINE_KEYS = tuple(f.name for f in dataclasses.fields(DiffusionPipelineConfig))


@dataclass
class _Request:
    prompt_ids: list[int]
    negative_prompt_ids: list[int] | None
    images: list[Any] | None
    params: dict[str, Any]


class DiffusersRollout(RolloutEngine):
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
    ):
        self.config, self.model_config, self.module, self.device = config, model_config, module, device
        self.adapter = DiffusionModelBase.get_class(model_config)
        self.autocast = autocast
        self.pipe = self.adapter.load_pipeline(model_config, device, dtype)
        speed_up_single_frames(self.pipe.vae)
        image_vae_on_gpu = device.type == "cuda" and all(p.ndim <= 4 for p in self.pipe.vae.parameters())
        if image_vae_on_gpu:
            self.pipe.vae.to(memory_format=torch.channels_last)
        default = image_vae_on_gpu and not config.vae_tiling  # tiles at the edges have sizes of their own
        self.compiled_vae = default if config.compile_vae is None else config.compile_vae
        if config.vae_tiling:
            self.pipe.vae.enable_tiling()
        if self.compiled_vae:
            self.pipe.vae.decoder.compile()
        modules = [m for m in self.pipe.components.values() if isinstance(m, torch.nn.Module)]
        encoders = [m for m in modules if m is not self.pipe.vae]
        self.encoders = Encoders(encoders, device, False if device.type == "cpu" else config.encoder_offload)
        self.batcher = Batcher(self.run_batch, config.max_num_seqs, config.request_batch_max_wait_ms / 1000)
        self._prompts: collections.OrderedDict[tuple, Conditions] = collections.OrderedDict()
        self._on_device: dict[tuple, Conditions] = {}
        self._prompt_cache_size = prompt_cache_size
        self.decode_batch_size = equal_parts(config.max_num_seqs, decode_batch_size)
        self.seconds: dict[str, float] = {}
        self._running, self._paused, self._stopped = False, False, False
        self._state = threading.Condition()

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
        """One image for one tokenized prompt. Concurrent calls share forwards, up to `max_num_seqs`."""
        if self._stopped:
            raise RuntimeError("the rollout engine has been stopped")
        request = _Request(list(prompt_ids), negative_prompt_ids, image_data, dict(sampling_params))
        key = tuple(
            repr(sampling_params.get(k)) for k in (*PIPELINE_KEYS, "noise_level", "sde_type", "keep_trajectory")
        )
        window = sampling_params.get("sde_window")
        key += (None if window is None else window[1] - window[0],)
        return await self.batcher.submit(request, key, sampling_params.get("position"))

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Between two batches. All weights that are trained, or an error: half of an update is no policy."""
        was_paused = self._paused
        self.pause()
        try:
            load_trained(self.module, weights)
            self.version = version
        finally:
            if not was_paused:
                self.resume()

    def pause(self) -> None:
        with self._state:
            self._paused = True
            self._state.wait_for(lambda: not self._running)

    def resume(self) -> None:
        with self._state:
            self._paused = False
            self._state.notify_all()

    def stop(self) -> None:
        self._stopped = True
        self.batcher.close(RuntimeError("the rollout engine has been stopped"))
        self.resume()

    def run_batch(self, requests: list[_Request]) -> list[RolloutOutput]:
        """One batch at a time, and none while the engine is paused."""
        with self._state:
            self._state.wait_for(lambda: not self._paused)
            self._running = True
        try:
            return self._draw(requests)
        finally:
            with self._state:
                self._running = False
                self._state.notify_all()

    @names_memory_knobs("rollout")
    @torch.no_grad()
    def _draw(self, requests: list[_Request]) -> list[RolloutOutput]:
        """Requests of one kind (size, steps, guidance, window length) through one denoising loop."""
        self._clock = time.perf_counter()
        params = requests[0].params
        model_config = self._model_config(params)
        scheduler = self.adapter.build_scheduler(model_config)
        self.adapter.set_timesteps(scheduler, model_config, self.device)

        guided = self.adapter.cfg_scale(model_config) > 1
        conditions = [self._conditions(r, guided, model_config) for r in requests]
        self.encoders.batch_encoded()
        generators = [self._generator(r.params.get("init_seed", r.params["seed"])) for r in requests]
        latents = self.adapter.prepare_latents(self.pipe, self.module, model_config, generators)
        for i, request in enumerate(requests):
            if "init_seed" in request.params:  # one start for the whole group, noise of its own for each sample
                generators[i] = self._generator(request.params["seed"])

        keep = params.get("keep_trajectory", False)
        self._tick("encode")
        with self.autocast():
            trajectory = denoise(
                self.adapter,
                self.module,
                scheduler,
                model_config,
                latents,
                stack_conditions(conditions),
                generators,
                windows=[tuple(r.params.get("sde_window") or (0, 0)) for r in requests],
                keep_means=params.get("keep_means", False),
                keep_uncond=params.get("keep_uncond", False),
                cfg_in_one_forward=self.config.cfg_in_one_forward,
            )
        self._tick("denoise")
        parts = trajectory.final_latents.split(self.decode_batch_size)
        images = torch.cat([self._decode(latents, model_config) for latents in parts]).cpu()
        self._tick("decode")
        rows = trajectory.rows()
        return [
            RolloutOutput(
                image,
                row if keep else {},
                {k: v[0] for k, v in cond.items()} if keep else {},
                modality="video" if image.ndim == 4 else "image",
                version=self.version,
            )
            for image, row, cond in zip(images, rows, conditions, strict=True)
        ]

    def _decode(self, latents: torch.Tensor, model_config: DiffusionModelConfig) -> torch.Tensor:
        """Pixels (uint8). A compiled decoder always sees full batches: another size would be compiled anew."""
        rows = len(latents)
        if self.compiled_vae and rows < self.decode_batch_size:
            latents = torch.cat([latents, latents[-1:].expand(self.decode_batch_size - rows, *latents.shape[1:])])
        pixels = self.adapter.decode_latents(self.pipe, latents, model_config)[:rows]
        return (pixels.float() * 255).round().to(torch.uint8)

    def _tick(self, phase: str) -> None:
        """Charge the time since the last tick to a phase; waits for the device, three times a batch."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._clock
        self._clock = now

    def begin(self) -> None:
        """Before a rollout: forget the times, and on the device the prompts, of the one before."""
        self.seconds, self._on_device = {}, {}
        self.encoders.rollout_begins()

    def take_seconds(self) -> dict[str, float]:
        """Time spent in each phase since the last call."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def _model_config(self, params: dict[str, Any]) -> DiffusionModelConfig:
        pipeline = {k: params[k] for k in PIPELINE_KEYS if k in params}
        algo = {k: params[k] for k in ("noise_level", "sde_type") if k in params}
        return dataclasses.replace(
            self.model_config,
            pipeline=dataclasses.replace(self.model_config.pipeline, **pipeline),
            algo=dataclasses.replace(self.model_config.algo, **algo),
        )

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def _conditions(self, request: _Request, guided: bool, model_config: DiffusionModelConfig) -> Conditions:
        conditions = dict(self._encode(request.prompt_ids, request.images, model_config))
        if guided:
            if request.negative_prompt_ids is None:
                raise ValueError("classifier-free guidance is on, but the request has no negative_prompt_ids")
            negative = self._encode(request.negative_prompt_ids, request.images, model_config)
            conditions |= {f"negative_{name}": value for name, value in negative.items()}
        return conditions

    def _encode(self, ids: list[int], images: list[Any] | None, model_config: DiffusionModelConfig) -> Conditions:
        """A distinct prompt is encoded once, and within a rollout it is on the device once, for all of its images."""
        key = (tuple(ids), *((image.mode, image.size, hash(image.tobytes())) for image in images or ()))
        if key in self._on_device:
            return self._on_device[key]
        if key in self._prompts:
            self._prompts.move_to_end(key)
        else:
            self.encoders.enter()
            encoded = self.adapter.encode_prompt(self.pipe, list(ids), model_config, images)
            self._prompts[key] = {k: v.cpu() for k, v in encoded.items()}
        self._on_device[key] = {k: v.to(self.device) for k, v in self._prompts[key].items()}
        if len(self._prompts) > self._prompt_cache_size:
            self._prompts.popitem(last=False)
        return self._on_device[key]


@torch.no_grad()
def load_trained(module: torch.nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy weights into the parameters of that name; every trained one, no other."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    missing = dict.fromkeys(trained)
    for name, tensor in weights:
        if name not in trained:
            raise KeyError(f"weights for {name}, which is no trained parameter of the rollout's model")
        trained[name].copy_(tensor)
        missing.pop(name, None)
    if missing:
        raise KeyError(f"{len(missing)} of {len(trained)} weights did not arrive, such as {next(iter(missing))}")


def equal_parts(total: int, most: int) -> int:
    """The size of as few equal parts as possible: 24 in parts of up to 16 are two of 12."""
    return math.ceil(total / math.ceil(total / most))


def stack_conditions(rows: list[Conditions]) -> Conditions:
    """Batch the features of single prompts; sequences (B, L, ...) of different length are padded with zeros."""
    return {name: pad_and_cat([row[name] for row in rows]) for name in rows[0]}
