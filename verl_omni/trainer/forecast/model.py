"""The model of a run, looked at without its weights: what it holds, and what it costs to run."""

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import torch

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.perf.live_bytes import LiveBytes, PretendedGpu
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.model_folder import library_of
from verl_omni.pipelines.sampling import transformer_inputs
from verl_omni.pipelines.single_frame_vae import speed_up_single_frames
from verl_omni.pipelines.utils import pipeline_class, read_index
from verl_omni.pipelines.weights import build_component
from verl_omni.trainer.forecast.passes import Pass, Passes
from verl_omni.trainer.forecast.weights import weights_of
from verl_omni.utils.model_code import refuse_code
from verl_omni.workers.engine.module import build_module, on_gpu, resolve_dtypes

GPU = torch.device("cuda")
DECODERS = {"vae", "audio_vae", "vocoder"}


class ModelCosts:
    """Of a run's model, with prompts of so many token ids, its own and the negative one."""

    def __init__(self, settings: DiffusionTrainerConfig, tokens: tuple[int, int], remember: bool = False):
        """`remember`: what is measured is kept for the next plan, and what was kept is not measured again."""
        self.remember, arr = remember, settings.actor_rollout_ref
        self.config, self.engine, self.tiling = arr.model, arr.actor.engine, arr.rollout.vae_tiling
        self.adapter = DiffusionModelBase.get_class(self.config)
        self.dtype, self.model_dtype = resolve_dtypes(self.engine, GPU, self.config.lora_rank > 0)
        # As the training engine does, before anything is read.
        module, parts = build_module(self.config, self.engine.seed, self.model_dtype, None, empty=True)
        self.part, self.weights, self.trained = next(iter(parts.values())), weights_of(parts.values()), tuple(parts)
        self.gpu = PretendedGpu()
        self.pipe = self._pipeline()
        self.latents = self.adapter.prepare_latents(self.pipe, module, self.config, [torch.Generator()])
        self.conditions = self._conditions(*tokens)

    # ---- forwards of the transformer -----------------------------------------------------------------

    @functools.cached_property
    def passes(self) -> Passes:
        adapter = self.adapter if self.remember else None
        return Passes(self.part, self._inputs, self.adapter.forward, self.dtype, self.gpu, adapter)

    def _inputs(self, rows: int) -> dict[str, Any]:
        """With the prompt: the half that is trained, and in a rollout the longer one."""
        latents = self.latents.expand(rows, *self.latents.shape[1:])
        timesteps = torch.full((rows,), 500.0)
        conditions = {name: value.expand(rows, *value.shape[1:]) for name, value in self.conditions.items()}
        try:
            return transformer_inputs(self.adapter, self.part, self.config, latents, timesteps, conditions)[0]
        except KeyError as missing:
            raise ValueError(
                f"plan does not know the shape of {missing} that {self.adapter.__name__}.encode_prompt makes: give it "
                "a classmethod conditions_like that has it (of encode_images: images_like)"
            ) from missing

    def _conditions(self, *tokens: int) -> Conditions:
        """In the dtype of the text encoder."""
        ours, negative = (self.adapter.conditions_like(self.config, count) for count in tokens)
        both = ours | ({f"negative_{name}": value for name, value in negative.items()} if self.guided else {})
        both |= self.adapter.images_like(self.config)
        return {k: v.to(self.dtype) if v.is_floating_point() else v for k, v in both.items()}

    @property
    def guided(self) -> bool:
        return self.adapter.cfg_scale(self.config) > 1

    # ---- what is around it ---------------------------------------------------------------------------

    def _pipeline(self) -> Any:
        """The upstream pipeline with what decodes alone, without weights."""
        kind = pipeline_class(self.config.architecture)
        parameters = inspect.signature(kind).parameters.values()
        parts = {p.name: None for p in parameters if p.default is p.empty}
        parts |= {name: build_component(self.config, name, self.dtype) for name in self._beside if name in DECODERS}
        if self.tiling:
            parts["vae"].enable_tiling()
        with self.gpu.here():
            for name in self._beside & DECODERS:
                parts[name].to_empty(device=self.gpu.device)
        return kind(**parts | {"vae": speed_up_single_frames(parts["vae"])})

    @functools.cached_property
    def _beside(self) -> set[str]:
        """The models of the folder that are diffusers' own and not trained."""
        index = read_index(self.config.path)
        named = {name: value for name, value in index.items() if isinstance(value, list) and value[0] is not None}
        others = {name for name, value in named.items() if library_of(*value) != "transformers"}
        root = Path(self.config.path).expanduser()
        return {name for name in others - {*self.trained, "scheduler"} if (root / name / "config.json").is_file()}

    @property
    def vae_bytes(self) -> int:
        return sum(_bytes(getattr(self.pipe, name)) for name in self._beside & DECODERS)

    @functools.cached_property
    def encoder_bytes(self) -> int:
        """Of all that makes features of a prompt, in the dtype that it is loaded in."""
        import transformers

        root = os.path.expanduser(self.config.path)
        found = sum(_bytes(build_component(self.config, name, self.dtype)) for name in self._beside - DECODERS)
        for name, value in read_index(self.config.path).items():
            if not isinstance(value, list) or library_of(*value) != "transformers" or value[1] is None:
                continue
            kind = getattr(transformers, value[1], None)
            if isinstance(kind, type) and issubclass(kind, torch.nn.Module):
                refuse_code(os.path.join(root, name))
                config = kind.config_class.from_pretrained(os.path.join(root, name))
                with torch.device("meta"):
                    found += sum(p.numel() for p in kind(config).parameters()) * self.dtype.itemsize
        return found

    @functools.cache  # noqa: B019  (lives as long as the command)
    def decode(self, rows: int) -> Pass:
        """Of latents to what is seen or heard. The decoder as it is written: compiled it takes less."""
        with self.gpu.here(), torch.no_grad():
            latents = torch.empty(rows, *self.latents.shape[1:])
            conditions = {name: torch.empty(rows, *value.shape[1:]) for name, value in self.conditions.items()}
            latents = self.adapter.whole_latents(latents, conditions)  # with those that a prompt gives
            with LiveBytes() as live:
                decoded = self.adapter.decode_latents(self.pipe, latents, self.config)
                several = isinstance(decoded, tuple)
                made = tuple(part.float() for part in decoded) if several else decoded.float()
                self.adapter.responses(made, self.pipe, self.config)
            return Pass(0, live.most, live.flops)

    # ---- what a sample is ----------------------------------------------------------------------------

    @property
    def latent_bytes(self) -> int:
        return self.latents.nbytes

    @property
    def condition_bytes(self) -> int:
        return sum(value.nbytes for value in self.conditions.values())


def _bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def compiles(settings: DiffusionTrainerConfig, sequence: int = 1) -> bool:
    """As the engine decides, with so many ranks that share each sample."""
    return sequence == 1 and on_gpu(settings.actor_rollout_ref.actor.engine.use_torch_compile, GPU)
