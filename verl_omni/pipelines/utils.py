"""Small helpers that several model adapters share."""

import functools
import importlib.metadata
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from verl_omni.utils.json_files import read_object
from verl_omni.utils.model_code import refuse_code
from verl_omni.utils.model_index import index_of, read_index_file
from verl_omni.utils.suggest import unknown


@functools.cache
def diffusers_since(release: str) -> bool:
    """Whether the diffusers that is installed is of this release or a later one."""
    return Version(importlib.metadata.version("diffusers")) >= Version(f"{release}.dev0")


def weights_in(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The argument of diffusers' `from_pretrained` that says so: 0.40 renamed it, and warns of the old name."""
    return {"dtype" if diffusers_since("0.40") else "torch_dtype": dtype}


def pipeline_class(architecture: str) -> type:
    """The diffusers pipeline of that name."""
    import diffusers

    if not hasattr(diffusers, architecture):
        names = [n for n in dir(diffusers) if n.endswith("Pipeline")]
        raise ValueError(unknown("diffusers pipeline", architecture, names))
    return getattr(diffusers, architecture)


def lora_files(architecture: str) -> type:
    """What of diffusers reads and writes the LoRA files of that pipeline.

    One that loads none itself, though its transformer takes them (`transformer.load_lora_adapter`), has a relative's.
    """
    from diffusers.loaders import HunyuanVideoLoraLoaderMixin

    pipeline = pipeline_class(architecture)
    return pipeline if hasattr(pipeline, "lora_state_dict") else HunyuanVideoLoraLoaderMixin


@functools.lru_cache(maxsize=64)
def read_component_config(path: str, component: str) -> dict[str, Any]:
    """config.json of one component of a diffusers folder."""
    return read_object(os.path.join(path, component, "config.json"))


@functools.lru_cache(maxsize=64)
def read_index(path: str) -> dict[str, Any]:
    """model_index.json of a diffusers folder, or what a modular pipeline has in its place."""
    return read_index_file(index_of(path))


def takes_guidance(model_config: Any) -> bool:
    """Whether the transformer itself is told a guidance scale, as guidance-distilled ones are."""
    return bool(read_component_config(model_config.path, model_config.transformer_subfolder).get("guidance_embeds"))


def load_component(model_config: Any, name: str, dtype: torch.dtype) -> torch.nn.Module:
    """One model of a diffusers folder, by the class that its config names."""
    import diffusers

    config = read_component_config(model_config.config_path or model_config.path, name)
    cls = getattr(diffusers, config["_class_name"])
    if model_config.load_format == "dummy":
        return random_model(lambda: cls.from_config(dict(config)), dtype)
    folder = os.path.expanduser(model_config.path)
    refuse_code(os.path.join(folder, name))
    model, loading = cls.from_pretrained(
        folder, subfolder=name, **weights_in(dtype), output_loading_info=True, use_safetensors=True
    )
    missing = sorted(set(loading["missing_keys"]) & dict(model.named_parameters()).keys())
    if missing:  # diffusers would leave them random
        raise ValueError(
            f"{os.path.join(folder, name)}: its config.json asks for {len(missing)} tensors that its weights do not "
            f"have, such as {missing[0]}: is the config that of another size of the model?"
        )
    return model


def random_model(build: Callable[[], torch.nn.Module], dtype: torch.dtype) -> torch.nn.Module:
    """A model with random weights, made where it will run: seconds even for billions of parameters.

    Drawn in bfloat16 whatever `dtype` is, so that two of different dtypes have the same weights.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return build().to(dtype).requires_grad_(True)
    finally:
        torch.set_default_dtype(before)


def random_pipeline(model_config: Any, dtype: torch.dtype, given: dict[str, Any]) -> Any:
    """A pipeline whose models have random weights; tokenizers and schedulers are the folder's own, or `given`."""
    import diffusers
    import transformers

    path = os.path.expanduser(model_config.path)
    parts = dict(given)
    for name, value in read_index(path).items():
        if name.startswith("_") or name in parts:
            continue
        if not isinstance(value, list):  # a setting of the pipeline
            parts[name] = value
            continue
        library, class_name = value
        if class_name is None:
            parts[name] = None
            continue
        home = {"diffusers": diffusers, "transformers": transformers}.get(library)
        cls = getattr(home or getattr(diffusers.pipelines, library), class_name)
        folder = os.path.join(path, name)
        if not issubclass(cls, torch.nn.Module):
            parts[name] = cls.from_pretrained(folder)
        elif issubclass(cls, transformers.PreTrainedModel):
            config = cls.config_class.from_pretrained(folder)
            parts[name] = random_model(lambda cls=cls, config=config: cls(config), dtype)
        else:
            config = read_component_config(model_config.config_path or model_config.path, name)
            parts[name] = random_model(lambda cls=cls, config=config: cls.from_config(dict(config)), dtype)
    return assembled(model_config.architecture, parts)


def assembled(architecture: str, parts: dict[str, Any]) -> Any:
    """The diffusers pipeline of that name, of these components."""
    kind = pipeline_class(architecture)
    if not is_modular(kind):
        return kind(**parts)
    pipe = kind()
    pipe.update_components(**{name: part for name, part in parts.items() if part is not None})
    return pipe


def is_modular(pipeline: type) -> bool:
    """By name: to import that class takes time, and says on the screen that it is experimental."""
    return any(base.__name__ == "ModularPipeline" for base in pipeline.__mro__)


def modular_pipeline(model_config: Any, dtype: torch.dtype, given: dict[str, Any]) -> Any:
    """One whose components are read from the folder, by the classes that its index names, or `given`.

    diffusers' own loader would read each from wherever the index says, and import any library that it names.
    """
    import diffusers
    import transformers

    path, libraries = os.path.expanduser(model_config.path), {"diffusers": diffusers, "transformers": transformers}
    parts = dict(given)
    for name, entry in read_index(path).items():
        if name.startswith("_") or name in parts or not isinstance(entry, list) or entry[1] is None:
            continue
        cls = getattr(libraries[entry[0]], entry[1])
        of_weights = weights_in(dtype) | {"use_safetensors": True} if issubclass(cls, torch.nn.Module) else {}
        parts[name] = cls.from_pretrained(os.path.join(path, name), **of_weights)
    return assembled(model_config.architecture, parts)


def load_tokenizers(path: str) -> dict[str, Any]:
    """All tokenizers and processors that model_index.json names, without loading a model."""
    import transformers

    path = os.path.expanduser(path)
    index = read_index(path)
    names = [k for k in index if k.startswith(("tokenizer", "processor")) and index[k][0] is not None]
    for name in names:
        refuse_code(os.path.join(path, name))
    return {n: getattr(transformers, index[n][1]).from_pretrained(os.path.join(path, n)) for n in names}


def acts_with_other_ranks(module: torch.nn.Module) -> bool:
    """Whether calling `module` is an operation of several ranks, because FSDP gathers weights or sums gradients.

    It is not in a rollout, where every rank holds all weights and nothing is differentiated.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return False
    wrapped = any(isinstance(m, FSDPModule) for m in module.modules())
    return wrapped and (torch.is_grad_enabled() or any(isinstance(p, DTensor) for p in module.parameters()))


def calls_of_all_ranks(module: torch.nn.Module, calls: int) -> int:
    """How often every rank has to call `module`, where this one would do with `calls`. To be asked before the first."""
    if not acts_with_other_ranks(module):
        return calls
    most = torch.tensor(calls, device=next(module.parameters()).device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


def forward_in_groups(
    module: torch.nn.Module, kinds: Sequence[Hashable], forward: Callable[[list[int]], torch.Tensor]
) -> torch.Tensor:
    """Rows of one kind through `forward(rows)` together, the output in the rows' order; ranks make equally many calls.

    For a transformer that takes one set of shapes for all rows of a call.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, kind in enumerate(kinds):
        groups.setdefault(kind, []).append(row)
    spare = calls_of_all_ranks(module, len(groups)) - len(groups)
    outputs = [forward(rows) for rows in groups.values()]
    idle = sum(0.0 * forward([0]).sum() for _ in range(spare))
    order = torch.tensor(sum(groups.values(), [])).argsort()
    return torch.cat(outputs)[order.to(outputs[0].device)] + idle


def forward_by_length(
    module: torch.nn.Module,
    inputs: dict[str, Any],
    mask: str,
    forward: Callable[[torch.nn.Module, dict[str, Any]], torch.Tensor],
) -> torch.Tensor:
    """One call for all rows whose text is of one length, by the mask of that name, which the transformer does not take.

    For one whose attention to the text has none.
    """
    lengths = inputs[mask].sum(dim=1).tolist()

    def rows_of_one_length(rows: list[int]) -> torch.Tensor:
        chosen = {name: value[rows] for name, value in inputs.items() if name != mask}
        chosen["encoder_hidden_states"] = chosen["encoder_hidden_states"][:, : lengths[rows[0]]]
        return forward(module, chosen)

    return forward_in_groups(module, lengths, rows_of_one_length)


def check_length(prompt: str, tokens: int, max_sequence_length: int) -> None:
    if tokens > max_sequence_length:
        raise ValueError(
            f"a prompt has {tokens} tokens, more than max_sequence_length={max_sequence_length}: shorten it or raise "
            "max_sequence_length of actor_rollout_ref.rollout.pipeline (in validation of rollout.val_kwargs.pipeline). "
            f'The prompt: "{prompt[:80]}..."'
        )


def clip_ids(tokenizer: Any, prompt: str) -> list[int]:
    """CLIP's fixed length, cut off where the prompt is longer, as upstream does: another encoder reads the rest."""
    return tokenizer(prompt, padding="max_length", max_length=tokenizer.model_max_length, truncation=True).input_ids


def t5_ids(tokenizer: Any, prompt: str, max_sequence_length: int) -> list[int]:
    """T5's ids padded to `max_sequence_length`: the models that read them were trained without a mask."""
    ids = tokenizer(prompt).input_ids
    check_length(prompt, len(ids), max_sequence_length)
    return ids + [tokenizer.pad_token_id] * (max_sequence_length - len(ids))


def dense_mask(mask: torch.Tensor | None) -> torch.Tensor | None:
    """None where a mask masks nothing, as diffusers does it: attention then takes its fast path."""
    return None if mask is None or bool(mask.all()) else mask


def trim_padding(embeds: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut the columns that are padding in every row."""
    longest = int(mask.sum(dim=1).max())
    return embeds[:, :longest], mask[:, :longest]


def flow_shift(image_seq_len: int, config: Any) -> float:
    """diffusers' `mu`: the shift of the noise schedule grows linearly with the number of latent tokens."""
    x0, x1 = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    y0, y1 = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
    slope = (y1 - y0) / (x1 - x0)
    return image_seq_len * slope + y0 - slope * x0


def audio_weights(share: float, video: int, sound: int) -> torch.Tensor:
    """Of mean 1, for a sequence of so many entries of a video and then of a sound, which counts as this share."""
    of_each = torch.tensor([(1 - share) / video, share / sound]) * (video + sound)
    return of_each.repeat_interleave(torch.tensor([video, sound]))


def encode_pixels(pipe: Any, images: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] to the VAE's own latents in float32: the mean of what its encoder predicts."""
    pixels = (2 * images - 1).to(pipe.vae.device, pipe.vae.dtype)
    return pipe.vae.encode(pixels).latent_dist.mode().float()


def encode_image(pipe: Any, images: torch.Tensor) -> torch.Tensor:
    """Images in [0, 1] to latents (B, C, h, w), for diffusers' AutoencoderKL."""
    return (encode_pixels(pipe, images) - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor


def decode_image(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    """Latents (B, C, h, w) to images in [0, 1], for diffusers' AutoencoderKL."""
    config = pipe.vae.config
    latents = (latents / config.scaling_factor + config.shift_factor).to(pipe.vae.dtype)
    return pipe.image_processor.postprocess(pipe.vae.decode(latents, return_dict=False)[0], output_type="pt")
