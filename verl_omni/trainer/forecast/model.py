"""The model of a run, looked at without its weights: what it holds, and what it costs to run."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.perf.live_bytes import LiveBytes, PretendedGpu
from verl_omni.pipelines.model_base import Conditions, DiffusionModelBase
from verl_omni.pipelines.model_folder import library_of
from verl_omni.pipelines.sampling import transformer_inputs
from verl_omni.pipelines.single_frame_vae import speed_up_single_frames
from verl_omni.pipelines.utils import assembled, is_modular, pipeline_class, read_index
from verl_omni.pipelines.weights import build_component
from verl_omni.trainer.forecast.passes import Lines, Pass, Passes
from verl_omni.trainer.forecast.remembered import Remembered, key_of
from verl_omni.trainer.forecast.weights import Weights, weights_of
from verl_omni.utils.model_code import refuse_code
from verl_omni.utils.model_index import index_of
from verl_omni.workers.engine.compile.blocks import repeated_blocks
from verl_omni.workers.engine.fp8 import layers_of
from verl_omni.workers.engine.lora import lora_layers
from verl_omni.workers.engine.module import build_module, on_gpu, resolve_dtypes

GPU = torch.device("cuda")
DECODERS = {"vae", "audio_vae", "vocoder"}
SCALE_BYTES = 4  # of each row of a weight in 8 bits


class ModelCosts:
    """Of a run's model, with prompts of so many token ids, its own and the negative one.

    `remember`: what is measured is kept for the next plan, which builds nothing where it asks for nothing else.
    """

    def __init__(self, settings: DiffusionTrainerConfig, tokens: tuple[int, int], remember: bool = False):
        arr = settings.actor_rollout_ref
        self.config, self.engine, self.tokens = arr.model, arr.actor.engine, tokens
        self.adapter = DiffusionModelBase.get_class(self.config)
        self.dtype, self.model_dtype = resolve_dtypes(self.engine, GPU, self.config.lora_rank > 0)
        self.known = Remembered(self._key() if remember else None)
        self.passes = Lines(lambda: self.model.passes, self.known)

    @functools.cached_property
    def model(self) -> "EmptyModel":
        return EmptyModel(self.config, self.adapter, self.engine.seed, (self.dtype, self.model_dtype), self.tokens)

    def _key(self) -> str:
        """Of all that figures depend on. The modules of an adapter of the user's own may be of classes that have no
        version: those are built to see which."""
        model, own = self.config, self.adapter.__module__.startswith("verl_omni.")
        folders = [Path(folder) for folder in (model.path, model.config_path) if folder]
        configs = [configs_in(folder, model.transformer_subfolder) for folder in folders]
        lora = (model.lora_rank, repr(model.target_modules), model.base_precision)
        about = [configs, model.architecture, model.transformer_subfolder, lora, repr(model.pipeline), self.tokens]
        classes = () if own else tuple(type(part) for part in self.model.parts.values())
        return key_of([*about, str(self.dtype), str(self.model_dtype)], (self.adapter, *classes))

    @functools.cached_property
    def weights(self) -> Weights:
        return Weights.of_rows(self.known.get("weights", lambda: self.model.weights.rows()))

    @property
    def vae_bytes(self) -> int:
        return self.known.get("vae bytes", lambda: self.model.vae_bytes)

    @property
    def encoder_bytes(self) -> int:
        return self.known.get("encoder bytes", lambda: self.model.encoder_bytes)

    def decode(self, rows: int, tiling: bool = False) -> Pass:
        """Of latents to what is seen or heard. The decoder as it is written: compiled it takes less."""
        measured = self.known.get(
            f"decode {rows}{' in tiles' * tiling}", lambda: dataclasses.astuple(self.model.decode(rows, tiling))
        )
        return Pass(*measured)

    def own_part(self, sequence: int) -> float:
        """Of a forward, on each of so many ranks that share a sample: their part of the tokens that are shared, and all
        others, such as those of a video's sound. A token of the one is taken to cost what one of the other costs."""
        if sequence == 1:
            return 1.0
        shared = self.adapter.shared_tokens(self.config) / self.adapter.tokens(self.config)
        return shared / sequence + (1 - shared)

    def eight_bits(self, modules: list[str] | None) -> tuple[int, int]:
        """Bytes of the copies in 8 bits of such layers, and of the weights with LoRA that have none."""
        names = modules or self.adapter.fp8_modules
        copies, others = self.known.get(f"8 bits of {' '.join(names)}", lambda: self.model.eight_bits(names))
        return copies, others

    # ---- what a sample is ----------------------------------------------------------------------------

    @property
    def latent_bytes(self) -> int:
        return self.known.get("latent bytes", lambda: self.model.latents.nbytes)

    @property
    def condition_bytes(self) -> int:
        return self.known.get("condition bytes", lambda: sum(v.nbytes for v in self.model.conditions.values()))


class EmptyModel:
    """The real modules, without memory."""

    def __init__(
        self,
        config: DiffusionModelConfig,
        adapter: type[DiffusionModelBase],
        seed: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        tokens: tuple[int, int],
    ):
        self.config, self.adapter, (self.dtype, model_dtype) = config, adapter, dtypes
        # As the training engine does, before anything is read.
        module, self.parts = build_module(config, seed, model_dtype, None, empty=True)
        self.weights = weights_of(self.parts.values())
        # Before a pass is measured, for which most blocks are taken out.
        self.blocks = [block for part in self.parts.values() for block in repeated_blocks(part)]
        self.adapted = [layer.get_base_layer() for layer in lora_layers(self.parts.values())]
        self.part = next(iter(self.parts.values()))
        self.gpu = PretendedGpu()
        self.latents = adapter.prepare_latents(self.pipe(False), module, config, [torch.Generator()])
        self.conditions = self._conditions(*tokens)

    # ---- forwards of the transformer -----------------------------------------------------------------

    @functools.cached_property
    def passes(self) -> Passes:
        return Passes(self.part, self.inputs, self.adapter.forward, self.dtype, self.gpu)

    def inputs(self, rows: int) -> dict[str, Any]:
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
        """In the dtype of the text encoder. Features are not zeros: those say that there is no image, say."""
        ours, negative = (self.adapter.conditions_like(self.config, count) for count in tokens)
        both = ours | ({f"negative_{name}": value for name, value in negative.items()} if self.guided else {})
        both |= self.adapter.images_like(self.config)
        return {k: torch.ones_like(v, dtype=self.dtype) if v.is_floating_point() else v for k, v in both.items()}

    @property
    def guided(self) -> bool:
        return self.adapter.cfg_scale(self.config) > 1

    def eight_bits(self, modules: Sequence[str]) -> tuple[int, int]:
        layers = {linear for linear, _ in layers_of(self.blocks, modules)}
        copies = sum((layer.in_features + SCALE_BYTES) * layer.out_features for layer in layers)
        return copies, sum(layer.weight.nbytes for layer in self.adapted if layer not in layers)

    # ---- what is around it ---------------------------------------------------------------------------

    @functools.cache  # noqa: B019  (lives as long as the command)
    def pipe(self, tiling: bool) -> Any:
        """The upstream pipeline with what decodes alone, without weights."""
        kind = pipeline_class(self.config.architecture)
        parameters = () if is_modular(kind) else inspect.signature(kind).parameters.values()
        parts = {p.name: self.parts.get(p.name) for p in parameters if p.default is p.empty}  # some ask for its config
        parts |= {name: build_component(self.config, name, self.dtype) for name in self._beside if name in DECODERS}
        if tiling:
            parts["vae"].enable_tiling()
        with self.gpu.here():
            for name in self._beside & DECODERS:
                parts[name].to_empty(device=self.gpu.device)
        return assembled(self.config.architecture, parts | {"vae": speed_up_single_frames(parts["vae"])})

    @functools.cached_property
    def _beside(self) -> set[str]:
        """The models of the folder that are diffusers' own and not trained."""
        index = read_index(self.config.path)
        named = {name: value for name, value in index.items() if isinstance(value, list) and value[0] is not None}
        others = {name for name, value in named.items() if library_of(*value) != "transformers"}
        root = Path(self.config.path).expanduser()
        return {name for name in others - {*self.parts, "scheduler"} if (root / name / "config.json").is_file()}

    @property
    def vae_bytes(self) -> int:
        return sum(_bytes(getattr(self.pipe(False), name)) for name in self._beside & DECODERS)

    @property
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

    def decode(self, rows: int, tiling: bool) -> Pass:
        pipe = self.pipe(tiling)
        with self.gpu.here(), torch.no_grad():
            latents = torch.empty(rows, *self.latents.shape[1:])
            conditions = {name: torch.empty(rows, *value.shape[1:]) for name, value in self.conditions.items()}
            latents = self.adapter.whole_latents(latents, conditions)  # with those that a prompt gives
            with LiveBytes() as live:
                decoded = self.adapter.decode_latents(pipe, latents, self.config)
                several = isinstance(decoded, tuple)
                made = tuple(part.float() for part in decoded) if several else decoded.float()
                self.adapter.responses(made, pipe, self.config)
            return Pass(0, live.most, live.flops)


def configs_in(folder: Path, *subfolders: str) -> dict[str, str]:
    """Of a model's folder and its components, which may be links to folders elsewhere."""
    root = folder.expanduser()
    files = {index_of(root), root / "config.json", *root.glob("*/config.json")}
    files |= {root / name / "config.json" for name in subfolders}
    return {str(file.relative_to(root)): file.read_text() for file in sorted(files) if file.is_file()}


def _bytes(module: torch.nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def compiles(settings: DiffusionTrainerConfig, sequence: int = 1) -> bool:
    """As the engine decides, with so many ranks that share each sample."""
    return sequence == 1 and on_gpu(settings.actor_rollout_ref.actor.engine.use_torch_compile, GPU)
