"""From requests to samples: prompts encoded once, noise of each sample's own, the denoising loop, pixels.

Every rollout engine draws with this. An engine says where the model lies: the pipeline around it (tokens to features,
latents to pixels) and the module that predicts.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig, DiffusionPipelineConfig
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.sampling import denoise
from verl_omni.utils.errors import RunError
from verl_omni.utils.padding import pad_and_cat
from verl_omni.utils.responses import Latents, Response

PIPELINE_KEYS = tuple(f.name for f in dataclasses.fields(DiffusionPipelineConfig))


@dataclass
class Request:
    """One sample that is asked for: tokens, and the parameters that differ from the run's own."""

    prompt_ids: list[int]
    negative_prompt_ids: list[int] | None
    images: list[Any] | None
    params: dict[str, Any]
    #: of somebody who looks on: no run depends on it
    guest: bool = False
    #: nobody waits for it any more
    gone: bool = False

    @property
    def kind(self) -> tuple:
        """Requests of one kind (size, steps, guidance, window length, precision) can share forwards."""
        names = (*PIPELINE_KEYS, "noise_level", "sde_type", "keep_trajectory", "precision", "latents")
        window = self.params.get("sde_window")
        return (*(repr(self.params.get(k)) for k in names), None if window is None else window[1] - window[0])


@dataclass
class Sample:
    """What was drawn for a request (`verl_omni.utils.responses`), and what training needs."""

    response: Response
    trajectory: dict[str, torch.Tensor] = field(default_factory=dict)
    conditions: dict[str, torch.Tensor] = field(default_factory=dict)


class Drawer:
    def __init__(
        self,
        model_config: DiffusionModelConfig,
        pipe: Any,
        module: torch.nn.Module,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        cfg_in_one_forward: bool = True,
        prompt_cache_size: int = 4096,
        decode_batch_size: int = 16,
        prompt_cache_megabytes: int = 8192,
    ):
        self.model_config, self.pipe, self.module, self.device = model_config, pipe, module, device
        self.adapter = DiffusionModelBase.get_class(model_config)
        self.autocast, self.cfg_in_one_forward = autocast, cfg_in_one_forward
        self.decode_batch_size = decode_batch_size
        self._prompts: collections.OrderedDict[tuple, Conditions] = collections.OrderedDict()
        self._on_device: dict[tuple, Conditions] = {}
        self._prompt_cache_size, self._prompt_cache_bytes = prompt_cache_size, prompt_cache_megabytes * 10**6
        self._prompt_bytes = 0

    # ---- for an engine that wants to know ------------------------------------------------------------

    def _before_encoding(self) -> None:
        """A new prompt is about to be encoded."""

    def _done(self, phase: str) -> None:
        """A part of a batch is done: encode, denoise, decode."""

    # ---- drawing -------------------------------------------------------------------------------------

    @torch.no_grad()
    def draw(self, requests: list[Request]) -> list[Sample]:
        """Requests of one kind through one denoising loop."""
        params = requests[0].params
        model_config = self._requested(params)
        scheduler = self.adapter.build_scheduler(model_config)
        self.adapter.set_timesteps(scheduler, model_config, self.device)

        guided = self.adapter.cfg_scale(model_config) > 1
        conditions = [self._conditions(r, guided, model_config) for r in requests]
        if self.adapter.brings("drawn_conditions"):
            if any(r.params.get("written") is None for r in requests):
                self._before_encoding()
            starts = [r.params.get("init_seed", r.params["seed"]) for r in requests]
            prompts, written = [r.prompt_ids for r in requests], [r.params.get("written") for r in requests]
            drawn = self.adapter.drawn_conditions(self.pipe, prompts, model_config, starts, written)
            conditions = [one | own for one, own in zip(conditions, drawn, strict=True)]
        stacked = stack_conditions(conditions)
        generators = [self._generator(r.params.get("init_seed", r.params["seed"])) for r in requests]
        latents = self.adapter.prepare_latents(self.pipe, self.module, model_config, generators)
        for i, request in enumerate(requests):
            if "init_seed" in request.params:  # one start for the whole group, noise of its own for each sample
                generators[i] = self._generator(request.params["seed"])
        self._done("encode")

        with self.autocast():
            trajectory = denoise(
                self.adapter,
                self.module,
                scheduler,
                model_config,
                latents,
                stacked,
                generators,
                windows=[tuple(r.params.get("sde_window") or (0, 0)) for r in requests],
                keep_means=params.get("keep_means", False),
                keep_uncond=params.get("keep_uncond", False),
                cfg_in_one_forward=self.cfg_in_one_forward,
                wanted=lambda: not all(r.gone for r in requests),
                branch_of=branches(requests),
            )
        self._done("denoise")

        whole = self.adapter.whole_latents(trajectory.final_latents, stacked)
        made = self._responses(whole, model_config, params.get("latents"))
        self._done("decode")
        if not params.get("keep_trajectory", False):
            return [Sample(response) for response in made]
        features = [{name: value[0] for name, value in row.items()} for row in conditions]
        rows = [row | drawn_as(model_config) for row in trajectory.rows()]
        return [Sample(*sample) for sample in zip(made, rows, features, strict=True)]

    def _requested(self, params: dict[str, Any]) -> DiffusionModelConfig:
        """The model's settings with what a request wants otherwise."""
        pipeline = {k: params[k] for k in PIPELINE_KEYS if k in params}
        algo = {k: params[k] for k in ("noise_level", "sde_type") if k in params}
        return dataclasses.replace(
            self.model_config,
            pipeline=dataclasses.replace(self.model_config.pipeline, **pipeline),
            algo=dataclasses.replace(self.model_config.algo, **algo),
        )

    def _generator(self, seed: int) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(seed)

    def _responses(
        self, latents: torch.Tensor, model_config: DiffusionModelConfig, wanted: str | None
    ) -> Sequence[Response]:
        """What is decoded; where latents are `wanted`, they `alone` (nothing is decoded), or beside it (`too`)."""
        decoded: Sequence[Response | None] = [None] * len(latents)
        if wanted != "alone":
            parts = [self._decode(part, model_config) for part in latents.split(self.decode_batch_size)]
            decoded = torch.cat(parts).cpu() if isinstance(parts[0], torch.Tensor) else list(itertools.chain(*parts))
        if wanted is None:
            return decoded
        check_finite(latents)
        values = self.adapter.latents_by_place(self.pipe, latents.float(), model_config).cpu()
        return [Latents(*pair) for pair in zip(values, decoded, strict=True)]

    def _decode(self, latents: torch.Tensor, model_config: DiffusionModelConfig) -> Sequence[Response]:
        """Pixels (uint8) as one tensor, or a list of whatever else the model makes."""
        decoded = self.adapter.decode_latents(self.pipe, latents, model_config)
        several = isinstance(decoded, tuple)
        parts = tuple(part.float() for part in (decoded if several else (decoded,)))
        check_finite(latents, *parts)
        return self.adapter.responses(parts if several else parts[0], self.pipe, model_config)

    # ---- prompts -------------------------------------------------------------------------------------

    def forget_device(self) -> None:
        """Before a rollout: the prompts of the one before need not stay on the device."""
        self._on_device = {}

    def _conditions(self, request: Request, guided: bool, model_config: DiffusionModelConfig) -> Conditions:
        images, seen, shared = request.images, seen_in(request.images, model_config), {}
        if self.adapter.brings("encode_images"):
            encode = functools.partial(self.adapter.encode_images, self.pipe, images, model_config)
            shared = self._once(("images", *seen), encode)
            if not self.adapter.tokenizes_images:  # text is encoded alone
                images, seen = None, ()
        conditions = self._encode(request.prompt_ids, images, seen, model_config) | shared
        if guided:
            if request.negative_prompt_ids is None:
                raise ValueError("classifier-free guidance is on, but the request has no negative_prompt_ids")
            negative = self._encode(request.negative_prompt_ids, images, seen, model_config)
            conditions = conditions | {f"negative_{name}": value for name, value in negative.items()}
        return conditions

    def _encode(
        self, ids: list[int], images: list[Any] | None, seen: tuple, model_config: DiffusionModelConfig
    ) -> Conditions:
        """Some adapters pad to the longest that a prompt may be, some are told how long a sound will be, and some text
        encoders see the images."""
        size = model_config.pipeline
        key = (tuple(ids), size.max_sequence_length, size.audio_duration_s, *seen)
        return self._once(
            key, functools.partial(self.adapter.encode_prompt, self.pipe, list(ids), model_config, images)
        )

    def _once(self, key: tuple, encode: Callable[[], Conditions]) -> Conditions:
        """What is distinct is encoded once, and within a rollout it is on the device once, for all who ask."""
        if key in self._on_device:
            return self._on_device[key]
        if key in self._prompts:
            self._prompts.move_to_end(key)
        else:
            self._before_encoding()
            self._prompts[key] = {k: v.cpu() for k, v in encode().items()}
            self._prompt_bytes += nbytes(self._prompts[key])
        self._on_device[key] = {k: v.to(self.device) for k, v in self._prompts[key].items()}
        while len(self._prompts) > self._prompt_cache_size or self._prompt_bytes > self._prompt_cache_bytes:
            self._prompt_bytes -= nbytes(self._prompts.popitem(last=False)[1])
        return self._on_device[key]


def seen_in(images: list[Any] | None, model_config: DiffusionModelConfig) -> tuple:
    """What tells images apart. They may become frames of what is drawn, and as large."""
    size, seen = model_config.pipeline, [(image.mode, image.size, hash(image.tobytes())) for image in images or ()]
    return (*seen, size.height, size.width, size.num_frames) if seen else ()


def branches(requests: list[Request]) -> list[int] | None:
    """The first of those here that part from the same state as each; None where none of them part."""
    states = [r.params.get("branch") for r in requests]
    return None if None in states else [states.index(state) for state in states]


def drawn_as(model_config: DiffusionModelConfig) -> dict[str, torch.Tensor]:
    """How a sample was drawn, for who replays it: `size` is height, width, the number of frames and the milliseconds of
    a sound (0 for what has none)."""
    size, noise = model_config.pipeline, model_config.algo.noise_level
    milliseconds = round(1000 * (size.audio_duration_s or 0))
    return {
        "size": torch.tensor([size.height, size.width, size.num_frames or 0, milliseconds]),
        "noise_level": torch.tensor(noise, dtype=torch.float64),
    }


def nbytes(conditions: Conditions) -> int:
    return sum(value.nbytes for value in conditions.values())


def equal_parts(total: int, most: int) -> int:
    """The size of as few equal parts as possible: 24 in parts of up to 16 are two of 12."""
    return math.ceil(total / math.ceil(total / most))


def stack_conditions(rows: list[Conditions]) -> Conditions:
    """Batch the features of single prompts; sequences (B, L, ...) of different length are padded with zeros."""
    return {name: pad_and_cat([row[name] for row in rows]) for name in rows[0]}


def check_finite(*tensors: torch.Tensor) -> None:
    """NaN would become black, and a black image would be scored and learned from."""
    bad = sum((~tensor.isfinite()).flatten(1).any(1) for tensor in tensors)
    if count := int(bad.count_nonzero()):
        raise RunError(
            f"{count} of {len(bad)} images have NaN or infinite values: the model has diverged, its guidance is too "
            "strong, or its VAE needs a wider dtype"
        )
