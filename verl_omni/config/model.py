"""Knobs of the model: where it lies, what of it is trained, and which algorithm trains it."""

import os
from dataclasses import dataclass
from typing import Any

from verl_omni.config.knob import MOST_SIDE, knob
from verl_omni.config.rollout import DiffusionPipelineConfig, DiffusionRolloutAlgoConfig
from verl_omni.utils.hub import model_folder
from verl_omni.utils.model_index import index_of, read_index_file

LORA = "actor_rollout_ref.model.lora_rank"


@dataclass
class DiffusionModelConfig:
    path: str | None = knob(
        None,
        "diffusers folder of the model (the one with model_index.json), or its name on the Hugging Face hub, such as "
        "Qwen/Qwen-Image",
    )
    revision: str | None = knob(
        None, "branch, tag or commit of the model on the hub; null: main. The run keeps to the commit that it is then"
    )
    algorithm: str = knob("flow_grpo", "the one flag that selects loss, advantage, sampling and adapter")
    architecture: str | None = knob(None, "pipeline class; null: read from model_index.json")
    external_lib: Any | None = knob(
        None, "module(s) or file(s) x.py to import everywhere: registers your algorithm, model, reward", may_change=True
    )
    tokenizer_path: str | None = knob(None, "tokenizer folder; null: the model's own")
    transformer_subfolder: str = knob("transformer", "subfolder of the trained transformer")
    config_path: str | None = knob(None, "folder of the transformer's config; null: beside its weights")
    load_format: str = knob(
        "auto", "auto (read the weights) or dummy (random weights of the folder's configs)", choices=("auto", "dummy")
    )
    lora_rank: int = knob(0, "LoRA rank; 0 trains all weights of the transformer", least=0, most=MOST_SIDE)
    lora_alpha: int = knob(64, "LoRA alpha", least=1, most=MOST_SIDE, needs=LORA)
    target_modules: Any | None = knob(None, "LoRA target modules; null: the architecture's default", needs=LORA)
    # Others of peft's (pissa, olora, ...) change the frozen weights, which are the reference and what LoRA files add
    # themselves to.
    lora_init: str = knob("gaussian", "peft's init_lora_weights", choices=("gaussian", "default"), needs=LORA)
    lora_path: str | None = knob(None, "folder with LoRA weights (diffusers format) to start from", needs=LORA)
    base_precision: str | None = knob(
        None,
        "int8: the frozen weights of the transformer's blocks are held in 8 bits, a scale each 64, where they draw and "
        "where they are trained on; null: as actor.engine.model_dtype says",
        choices=("int8",),
        needs=LORA,
    )
    enable_gradient_checkpointing: bool = knob(
        False, "recompute activations in the backward pass to save memory", may_change=True
    )
    # In a run these two are the rollout's own (`Any`, because OmegaConf lets no typed node be an interpolation).
    pipeline: Any = knob(None, "the rollout's pipeline knobs")
    algo: Any = knob(None, "the rollout's algo knobs")

    def __post_init__(self) -> None:
        self._find_folders()
        self.pipeline = self.pipeline or DiffusionPipelineConfig()
        self.algo = self.algo or DiffusionRolloutAlgoConfig()
        if self.architecture is None and self.path is not None:
            self.architecture = read_architecture(self.path)

    def _find_folders(self) -> None:
        """What was named on the hub becomes the folder of its copy here, whichever machine this is.

        The weights, which take their time, are fetched before a run starts, and by `check_model_folder`.
        """
        if self.path is not None:
            self.path = model_folder(self.path, self.revision, weights=False)
        for name in ("tokenizer_path", "config_path", "lora_path"):
            if getattr(self, name) is not None:
                setting = f"actor_rollout_ref.model.{name}"
                setattr(self, name, model_folder(getattr(self, name), weights=name == "lora_path", setting=setting))


def read_architecture(path: str) -> str:
    """`_class_name` of a diffusers folder, or one clear line on what is wrong with the folder."""
    index = index_of(path)
    if not os.path.isdir(os.path.expanduser(path)):
        raise FileNotFoundError(
            f'actor_rollout_ref.model.path="{path}" is no folder: give a diffusers folder, or a name on the Hugging '
            "Face hub, such as Qwen/Qwen-Image"
        )
    if not os.path.isfile(index):
        raise FileNotFoundError(
            f'actor_rollout_ref.model.path="{path}" holds no model_index.json: expected a folder written by '
            "diffusers' `pipe.save_pretrained(folder)`"
        )
    name = read_index_file(index).get("_class_name")
    if not isinstance(name, str):
        raise ValueError(
            f"{index} names no pipeline (_class_name): expected what diffusers' `pipe.save_pretrained(folder)` writes"
        )
    return name
