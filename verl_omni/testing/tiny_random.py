"""Tiny checkpoints with random weights: valid diffusers folders of the real classes, for trying things on a CPU.

    python -m verl_omni.testing.tiny_random QwenImagePipeline OUT

A folder is built without network in about a second, in float32, byte for byte the same for the same seed. Every tiny
model answers to each of its inputs (prompt, timestep, latents), so that a test that mixes up two of them fails.

A new architecture is one function: a builder, registered under the pipeline's class name, that returns the pipeline. A
variant of a class has a name after a hyphen, as in WanPipeline-2.2. Ours are in `tiny_images.py`, `tiny_videos.py` and
`tiny_sounds.py`.
"""

import functools
import json
from pathlib import Path
from typing import Any

import torch

from verl_omni.pipelines.utils import is_modular
from verl_omni.testing import tiny_images, tiny_sounds, tiny_videos  # noqa: F401  (registers their builders)
from verl_omni.testing.tiny_builders import BUILDERS, image_vae, register_builder, strengthen
from verl_omni.testing.tiny_image_text import image_text_model
from verl_omni.testing.tiny_images import QWEN_EDIT_PREFIX, QWEN_IMAGE_PREFIX
from verl_omni.testing.tiny_text import language_model, qwen_tokenizer
from verl_omni.utils.model_index import MODULAR
from verl_omni.utils.options import Parser, at_least
from verl_omni.utils.suggest import unknown

__all__ = [
    "BUILDERS", "QWEN_EDIT_PREFIX", "QWEN_IMAGE_PREFIX", "build_tiny_random", "image_vae", "register_builder",
    "strengthen",
]  # fmt: skip


WRITERS = {  # of prompts
    "AutoModelForCausalLM": language_model,
    "AutoModelForImageTextToText": functools.partial(image_text_model, "qwen2_5_vl"),
}
PART = "GlmImageForConditionalGeneration"


def build_tiny_random(pipeline_class: str, out: str | Path, seed: int = 0) -> Path:
    """Build the tiny-random checkpoint of a pipeline class, or of a language model, in the folder ``out``."""
    if pipeline_class in WRITERS:
        return build_tiny_writer(pipeline_class, out, seed)
    if pipeline_class == PART:
        raise ValueError(f"{PART} is a part of a GlmImagePipeline: name that, a miniature of it has one too")
    if pipeline_class not in BUILDERS:
        raise ValueError(unknown("tiny pipeline", pipeline_class, BUILDERS))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = BUILDERS[pipeline_class]()
    if is_modular(type(pipeline)):
        save_modular(pipeline, str(out))
    else:
        pipeline.save_pretrained(out)
    return Path(out)


def save_modular(pipeline: Any, out: str) -> None:
    """Its index names the folder for each component: here the one that it lies in, wherever that is."""
    pipeline.save_pretrained(out, overwrite_modular_index=True)
    index = Path(out, MODULAR)
    index.write_text(index.read_text().replace(json.dumps(out), '"."'))


def build_tiny_writer(kind: str, out: str | Path, seed: int = 0) -> Path:
    """One that writes prompts: a Qwen2 or a Qwen2.5-VL, with a chat template."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = qwen_tokenizer(["user assistant system\n", "a red cat on a green mat, a small house in blue snow"])
        model = WRITERS[kind](tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return Path(out)


def main() -> None:
    parser = Parser(description="Write a tiny checkpoint with random weights in diffusers' format.")
    parser.add_argument("pipeline_class", metavar="PIPELINE", help=f"one of: {', '.join(sorted(BUILDERS))}")
    parser.add_argument("out", metavar="OUT", help="folder to write")
    parser.add_argument("--seed", type=at_least(0), default=0)
    args = parser.parse_args()
    try:
        print(build_tiny_random(args.pipeline_class, args.out, args.seed))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
