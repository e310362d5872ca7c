"""Language models (transformers' AutoModelForCausalLM): how one is loaded, asked and saved. It draws nothing itself."""

import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.builtin import OTHERS
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.weights import FolderTensors, NamedTensors, parameters_on_meta
from verl_omni.utils.hub import model_folder
from verl_omni.utils.json_files import read_object
from verl_omni.utils.model_code import refuse_code

CAUSAL_LM = "AutoModelForCausalLM"
WEIGHTS = "model.safetensors"  # as transformers calls the file, or with .index.json those of several


@DiffusionModelBase.register(CAUSAL_LM)
class CausalLM(DiffusionModelBase):
    """Where it is alone, nothing is drawn: what it writes is the response, and settings of drawings say nothing."""

    trained_components = ("rewriter",)
    size_multiple = 1
    # The folders that are an adapter's own, by the model_type of their config.json. This one has all others.
    model_types: ClassVar[tuple[str, ...]] = ()
    # The architecture that draws the tokens that are written; None: texts are written, for anything that reads them.
    drawn_by: ClassVar[str | None] = None

    @classmethod
    def makes(cls, model_config: DiffusionModelConfig) -> str:
        return "text"

    @classmethod
    def pipeline_knobs(cls, model_config: DiffusionModelConfig) -> set[str]:
        return set()

    @classmethod
    def missing_for_training(cls) -> list[str]:
        return []

    @classmethod
    def missing_for_rollout(cls) -> list[str]:
        return []

    @classmethod
    def vae_scale_factor(cls, model_config: DiffusionModelConfig) -> int:
        return 1

    @classmethod
    def transformer_config(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        """There is no diffusion transformer: transformers chooses its attention."""
        return {}

    @classmethod
    def build_scheduler(cls, model_config: DiffusionModelConfig):
        from verl_omni.pipelines.schedulers import FlowMatchSDEDiscreteScheduler

        return FlowMatchSDEDiscreteScheduler()

    @classmethod
    def load_tokenizers(cls, model_config: DiffusionModelConfig) -> dict[str, Any]:
        return {}

    @classmethod
    def tokenize(
        cls, tokenizers: dict[str, Any], prompt: str, max_sequence_length: int, images: list[Any] | None = None
    ) -> list[int]:
        return []

    @classmethod
    def model_class(cls) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    @classmethod
    def build_module(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        """Where transformers would change what it reads, it has read it: every rank then reads all of it."""
        from transformers import GenerationConfig

        path = os.path.expanduser(model_config.path)
        refuse_code(path)
        model = build_empty(cls.model_class(), path, dtype)
        why = changed_in_reading(model, path, dtype)
        if why is None:
            ends = model.generation_config.eos_token_id
            if Path(path, "generation_config.json").is_file():
                ends = GenerationConfig.from_pretrained(path).eos_token_id
        else:
            model = read_whole(cls.model_class(), path, dtype)
            print(f"{model_config.path}: every rank reads the whole model, as {why}.", flush=True)
            ends = model.generation_config.eos_token_id
        # Penalties, top-k and the like of the folder's own would change what is sampled, and not what is trained.
        model.generation_config = GenerationConfig(eos_token_id=ends)
        return model.eval().requires_grad_(True)

    @classmethod
    def named_tensors(cls, model_config: DiffusionModelConfig, part: str) -> NamedTensors:
        return FolderTensors(os.path.expanduser(model_config.path), WEIGHTS)

    @classmethod
    def write_part(
        cls, model_config: DiffusionModelConfig, part: torch.nn.Module, state: dict[str, torch.Tensor], folder: str
    ) -> None:
        """A whole folder for `AutoModelForCausalLM.from_pretrained`, with its tokenizer."""
        place, own = Path(folder).parent, Path(model_config.path).expanduser()  # it is the only part there
        part.save_pretrained(place, state_dict={name: tensor.contiguous() for name, tensor in state.items()})
        if (own / "generation_config.json").is_file():
            # As it is: transformers reads settings that contradict each other, and refuses to write them.
            shutil.copyfile(own / "generation_config.json", place / "generation_config.json")
        cls.write_tokenizer(model_config, place)

    @classmethod
    def write_tokenizer(cls, model_config: DiffusionModelConfig, place: Path) -> None:
        load_tokenizer(model_config.path).save_pretrained(place)


def build_empty(model_class: Any, path: str, dtype: torch.dtype) -> torch.nn.Module:
    """A model of transformers' as its folder's config describes it, parameters on the meta device. Tables that are
    computed and not read have their values."""
    from transformers import AutoConfig

    build = getattr(model_class, "from_config", None) or model_class._from_config  # an Auto class, or one model's own
    config = AutoConfig.from_pretrained(path)
    for one in filter(None, (config, *(getattr(config, name, None) for name in config.sub_configs))):
        one.dtype = dtype
    with parameters_on_meta():
        return build(config, dtype=dtype)


def changed_in_reading(model: torch.nn.Module, path: str, dtype: torch.dtype) -> str | None:
    """Why the tensors of a folder are not, one by one, what transformers makes of them. None: they are."""
    if not any(Path(path, name).is_file() for name in (WEIGHTS, f"{WEIGHTS}.index.json")):
        return f"there is no {WEIGHTS}"
    if getattr(model.config, "quantization_config", None) is not None:
        return "its weights are quantised"
    halves = (torch.float16, torch.bfloat16)
    if getattr(model, "_keep_in_fp32_modules_strict", None) and dtype in halves:
        return "transformers keeps some of it in float32"
    stored = FolderTensors(path, WEIGHTS).shapes
    names: dict[torch.Tensor, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, []).append(name)
    for tensor, called in names.items():
        there = [name for name in called if name in stored]
        if len(there) != 1:  # none: its files have other names for it, or lack it; two: they may differ
            return f"its files hold {called[0]} {len(there)} times"
        if stored[there[0]] != tuple(tensor.shape):
            return f"its files hold {there[0]} in another shape"
    return None


def read_whole(model_class: Any, path: str, dtype: torch.dtype) -> torch.nn.Module:
    model, loading = model_class.from_pretrained(path, dtype=dtype, use_safetensors=True, output_loading_info=True)
    missing = sorted(set(loading["missing_keys"]))
    if missing:  # transformers would leave them random
        raise ValueError(
            f"{path}: its config.json asks for {len(missing)} tensors that its weights do not have, such as "
            f"{missing[0]}"
        )
    return model


def writer_of(path: str) -> tuple[str, type[CausalLM]]:
    """The architecture of what `actor_rollout_ref.rewriter.path` names, a folder or a model on the hub; its adapter."""
    folder = model_folder(path, weights=False, setting="actor_rollout_ref.rewriter.path")
    model_type = read_object(Path(folder).expanduser() / "config.json").get("model_type")
    registry = DiffusionModelBase.registry
    for architecture in OTHERS:
        registry.find(architecture, "flow_grpo")  # ours are there from now on
    for architecture, adapters in registry.adapters.items():
        for adapter in map(adapters.get, adapters):
            if issubclass(adapter, CausalLM) and model_type in adapter.model_types:
                return architecture, adapter
    return CAUSAL_LM, CausalLM


def load_tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    refuse_code(path)
    return AutoTokenizer.from_pretrained(os.path.expanduser(path))


def tokenize(tokenizer: Any, prompt: str, template: str, system: str | None) -> list[int]:
    """What the model goes on from: in its chat template, where it has one."""
    asked = template.replace("{prompt}", prompt)
    if not tokenizer.chat_template:
        return tokenizer(asked if system is None else f"{system}\n{asked}").input_ids
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": asked})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids
