"""Our own adapters, known by name: nothing is imported before somebody asks for one."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# The package of each architecture, which registers its adapter.
BUILTIN: dict[str, str] = {
    "AceStepPipeline": "verl_omni.pipelines.ace_step",
    "ChromaPipeline": "verl_omni.pipelines.chroma",
    "CogView4Pipeline": "verl_omni.pipelines.cogview4",
    "Flux2KleinPipeline": "verl_omni.pipelines.flux2",
    "Flux2Pipeline": "verl_omni.pipelines.flux2",
    "FluxKontextPipeline": "verl_omni.pipelines.flux_kontext",
    "FluxPipeline": "verl_omni.pipelines.flux",
    "GlmImagePipeline": "verl_omni.pipelines.glm_image",
    "HunyuanVideo15Pipeline": "verl_omni.pipelines.hunyuan_video_15",
    "LongCatAudioDiTPipeline": "verl_omni.pipelines.longcat_audio",
    "LTX2ImageToVideoPipeline": "verl_omni.pipelines.ltx2",
    "LTX2Pipeline": "verl_omni.pipelines.ltx2",
    "Lumina2Pipeline": "verl_omni.pipelines.lumina2",
    "MiniMaxH3ModularPipeline": "verl_omni.pipelines.minimax_h3",
    "QwenImageEditPlusPipeline": "verl_omni.pipelines.qwen_image_edit_plus",
    "QwenImagePipeline": "verl_omni.pipelines.qwen_image",
    "StableDiffusion3Pipeline": "verl_omni.pipelines.sd3",
    "WanImageToVideoPipeline": "verl_omni.pipelines.wan_image_to_video",
    "WanPipeline": "verl_omni.pipelines.wan",
    "ZImagePipeline": "verl_omni.pipelines.z_image",
}
# Of what is no diffusion model: what writes prompts or tokens for one, or stands alone.
OTHERS = {
    "AutoModelForCausalLM": "verl_omni.pipelines.causal_lm",
    "AutoModelForImageTextToText": "verl_omni.pipelines.image_text",
    "GlmImageForConditionalGeneration": "verl_omni.pipelines.glm_image.writer",
}


class Listed(NamedTuple):
    architecture: str
    about: str
    needs_images: bool


def listed() -> Iterator[Listed]:
    """What their files say of them. To import the adapters would take ten seconds: they import diffusers."""
    for architecture, package in {**BUILTIN, **OTHERS}.items():
        file = Path(find_spec("verl_omni.pipelines").submodule_search_locations[0], *package.split(".")[2:])
        source = ast.parse((file / "adapter.py" if file.is_dir() else file.with_suffix(".py")).read_text())
        body = [line for node in source.body if architecture in registered_as(node) for line in node.body]
        with_images = "needs_images = True" in map(ast.unparse, body)
        of_class = next((line.value.value for line in body if is_about(line)), None)
        yield Listed(architecture, of_class or first_words(ast.get_docstring(source)), with_images)


def is_about(line: ast.stmt) -> bool:
    """`about = "..."` in a class, where its file is about another one."""
    return isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "about"


def registered_as(node: ast.stmt) -> list[str]:
    """The names in the decorators of a class."""
    calls = [one for one in getattr(node, "decorator_list", ()) if isinstance(one, ast.Call)]
    return [word.value for call in calls for word in call.args if isinstance(word, ast.Constant)]


def first_words(about: str) -> str:
    return re.split(r"[:\n]", about)[0].strip()
