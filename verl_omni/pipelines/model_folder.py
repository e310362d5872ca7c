"""Is a folder a whole model in diffusers' layout? Looked at before any worker starts, without loading a weight."""

import functools
import inspect
import json
import os
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.utils import is_modular, read_index
from verl_omni.utils.hub import fetch_weights
from verl_omni.utils.json_files import read_object
from verl_omni.utils.model_index import index_of
from verl_omni.utils.regular_files import open_regular
from verl_omni.utils.suggest import nearest

LAYOUT = "expected what diffusers' `pipe.save_pretrained(folder)` writes"
# What every model needs. Others, such as a third text encoder, a folder may leave out by [null, null].
ALWAYS = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")
# Of these no other class will do: tokenizers, schedulers and encoders have relatives that serve as well.
STRICT = ("transformer", "vae")
MODELS = ("transformer", "vae", "text_encoder", "vision_language_encoder")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model", "tekken.json")
WEIGHTS, PICKLES = ".safetensors", (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_model_folder(model: DiffusionModelConfig, weights: bool = True) -> None:
    """One line that names the file, where something is missing or is not what model_index.json says.

    The weights of a model on the hub are downloaded for that; without `weights` they are not looked at.
    """
    weights = weights and model.load_format != "dummy"
    if weights:
        fetch_weights(model.path)
    DiffusionModelBase.get_class(model).refuse_code(model)
    import diffusers
    import transformers

    root = Path(model.path).expanduser()
    file, index = index_of(root), read_index(model.path)
    libraries = {"diffusers": diffusers, "transformers": transformers}
    for name, kinds in _components(model).items():
        if name not in index:
            raise ValueError(f'{file} has no component "{name}", which a {model.architecture} needs: {LAYOUT}')
        entry = index[name]
        if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(e, str | None) for e in entry):
            raise ValueError(f'{file} has "{name}": {json.dumps(entry)}: expected ["library", "class"]; {LAYOUT}')
        library, class_name = entry
        if class_name is None:
            if name in ALWAYS:
                raise ValueError(f'{file} names no class for "{name}": {LAYOUT}')
            continue
        library = library_of(library, class_name)
        if library not in libraries:
            continue  # one that the adapter names
        known = _names_in(libraries[library])
        if class_name not in known:
            raise ValueError(
                f'{file} has "{name}" of the class {class_name}, which {library} '
                f"{libraries[library].__version__} does not have.{nearest(class_name, known)}"
            )
        if kinds and class_name not in kinds:
            raise ValueError(
                f'{file} has "{name}" of the class {class_name}: a {model.architecture} has a {" or ".join(kinds)}'
            )
        folder = _check_component(root, model, name, library, class_name)
        if weights and name.startswith(MODELS):
            _check_weights(folder)


def library_of(library: str | None, class_name: str | None) -> str | None:
    """Whose a component's class is: diffusers may have written its own module that is called as one of transformers."""
    import transformers

    known = library in (None, "diffusers", "transformers")
    return "transformers" if not known and class_name in _names_in(transformers) else library


@functools.cache
def _names_in(library: ModuleType) -> frozenset[str]:
    """Half a second for transformers, which has thousands and looks for each; nothing is imported."""
    return frozenset(dir(library))


def _components(model: DiffusionModelConfig) -> dict[str, tuple[str, ...]]:
    """Components that a pipeline cannot do without, each with its classes where only those will do."""
    import diffusers

    pipeline = getattr(diffusers, model.architecture, None)
    if pipeline is None:  # registered by a user
        return {}
    if is_modular(pipeline):
        classes = {spec.name: spec.type_hint.__name__ for spec in pipeline().blocks.expected_components}
        names = DiffusionModelBase.get_class(model).modular_parts
        return {name: (classes[name],) if name in STRICT else () for name in names}
    hints = typing.get_type_hints(pipeline.__init__)
    optional = set(pipeline._optional_components) - set(ALWAYS)
    found = {}
    for name, parameter in inspect.signature(pipeline.__init__).parameters.items():
        # diffusers saves no component that has a default, unless its class calls it optional.
        saved = parameter.default is parameter.empty or (name in ALWAYS and name in pipeline._optional_components)
        if name == "self" or name in optional or not saved:
            continue
        kinds = typing.get_args(hints.get(name)) or (hints.get(name),)
        found[name] = tuple(k.__name__ for k in kinds if k not in (None, type(None))) if name in STRICT else ()
    return found


def _check_component(root: Path, model: DiffusionModelConfig, name: str, library: str, class_name: str) -> Path:
    trained = name == "transformer"
    folder = root / (model.transformer_subfolder if trained else name)
    if name.startswith("tokenizer") and model.tokenizer_path is not None:
        folder = Path(model.tokenizer_path).expanduser() / name
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is missing: {index_of(root)} names a {class_name} there")
    if name.endswith("scheduler"):
        read_object(folder / "scheduler_config.json")
    # transformers makes a tokenizer without a word of a folder that has none.
    spells = name.startswith("tokenizer") and class_name != "ByT5Tokenizer"  # to which every byte is a token
    if spells and not any((folder / vocabulary).is_file() for vocabulary in VOCABULARIES):
        raise FileNotFoundError(f"{folder} holds no vocabulary ({', '.join(VOCABULARIES)})")
    if not name.startswith(MODELS):
        return folder
    config = folder / "config.json"
    if trained and model.config_path is not None:
        config = Path(model.config_path).expanduser() / model.transformer_subfolder / "config.json"
    said = read_object(config)
    if library == "diffusers":
        if "_class_name" not in said:
            raise ValueError(f"{config} has no _class_name: expected {class_name}, as {index_of(root).name} says")
        if said["_class_name"] != class_name:
            raise ValueError(
                f"{config} is of a {said['_class_name']}: expected {class_name}, as {index_of(root).name} says"
            )
    return folder


def _check_weights(folder: Path) -> None:
    """There are some, no shard is missing, and no file is cut off."""
    from safetensors import SafetensorError, safe_open

    for index in folder.glob("*.index.json"):
        shards: Any = read_object(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{index} has no weight_map: {LAYOUT}")
        for shard in sorted(set(map(str, shards.values()))):
            if Path(shard).name != shard:
                raise ValueError(f"{index} names {shard[:100]}, which lies outside {folder}")
            if not os.path.isfile(folder / shard):
                raise FileNotFoundError(f"{folder / shard} is missing: {index.name} names it")
    files = [path for path in sorted(folder.iterdir()) if path.suffix == WEIGHTS]
    pickled = [path.name for path in sorted(folder.iterdir()) if path.suffix in PICKLES]
    if pickled and not files:
        raise ValueError(
            f"{folder} holds its weights as a pickle ({pickled[0]}), which can run code when it is read: save it with "
            "diffusers' or transformers' `save_pretrained(folder)`, which writes safetensors"
        )
    if not files:
        raise FileNotFoundError(f"{folder} holds no weights (*{WEIGHTS})")
    for path in files:
        open_regular(path).close()  # safetensors would wait for a named pipe
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is cut off or no safetensors file: {error}") from None
