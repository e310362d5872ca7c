"""What the shipped recipes take from the environment, in miniature."""

import functools
import tempfile
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from tiny_models import tiny_adapter, tiny_checkpoint

from benchmarks.plan_recipes import write_inputs, write_prompts
from benchmarks.recipe_models import WITH_IMAGES, kind_of
from verl_omni.cli import recipes
from verl_omni.config import schema

# Of what recipes train: a tiny one, and how their headers call it.
TINY = {
    "flux_dev": ("FluxPipeline", "FLUX.1-dev"),
    "flux_kontext": ("FluxKontextPipeline", "FLUX.1 Kontext"),
    "longcat": ("LongCatAudioDiTPipeline", "LongCat-AudioDiT"),
    "ltx2": ("LTX2Pipeline", "LTX-2"),
    "qwen_image": ("QwenImagePipeline", "Qwen-Image"),
    "sd35m": ("StableDiffusion3Pipeline", "SD3.5-medium"),
    "wan_1_3b": ("WanPipeline", "Wan2.1-T2V-1.3B"),
    "wan_ti2v_5b": ("WanPipeline-TI2V", "Wan2.2-TI2V-5B"),
}
TEACHER_RANK = 32


@functools.cache
def _inputs() -> tuple[tempfile.TemporaryDirectory, dict[str, str]]:
    held = tempfile.TemporaryDirectory(prefix="recipes-")
    folder = Path(held.name)
    said = write_inputs(folder)
    tiny_adapter(folder / "teacher", TEACHER_RANK)
    for images in (False, True):
        write_prompts(folder / f"data_{images}", images)
    return held, said


def composed_recipe(name: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> DictConfig:
    held, said = _inputs()
    kind = kind_of(name)
    data = Path(held.name) / f"data_{kind in WITH_IMAGES}"
    for variable, value in (said | {"MODEL_PATH": tiny_checkpoint(TINY[kind][0]), "DATA_DIR": data}).items():
        monkeypatch.setenv(variable, str(value))
    schema.register()
    with initialize_config_dir(str(recipes.FOLDER), version_base=None):
        return compose(name, ["hydra.searchpath=[pkg://verl_omni.trainer.config]", *overrides])
