import dataclasses
import hashlib
import inspect
from pathlib import Path

import pytest
import test_architectures as architectures
import torch
from diffusers import DiffusionPipeline
from test_architectures import mended_upstream, small_references  # noqa: F401
from tiny_models import skip_unless_known, tiny_checkpoint
from transformers import Qwen2Tokenizer

from verl_omni.testing.tiny_random import BUILDERS, QWEN_EDIT_PREFIX, QWEN_IMAGE_PREFIX, build_tiny_random

PIPELINES = sorted(BUILDERS)
# Others want images or make sound: they draw in pipelines/test_architectures.py, and in the last test here.
SOUND = {"audio_duration_s", "frame_rate"}
MODULAR = "MiniMaxH3ModularPipeline"
PARTICULAR = [
    row for row in architectures.TABLE if row.images or SOUND & {*row.sizes[0], *row.both} or row.name == MODULAR
]
SELDOM = {row.name for row in architectures.TABLE if row.seldom}
MARKED = [pytest.param(name, marks=[pytest.mark.slow] if name in SELDOM else []) for name in PIPELINES]
DRAWN = [one for one in MARKED if one.values[0].split("-")[0] not in {row.name for row in PARTICULAR}]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def draw(pipe: DiffusionPipeline, prompt: str = "a cat", seed: int = 0, height: int = 32, width: int = 48):
    """An image (H, W, 3), or a video with frames before that."""
    takes = inspect.signature(pipe.__call__).parameters
    return pipe(
        prompt=prompt,
        height=height,
        width=width,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
        **({"num_frames": 5} if "num_frames" in takes else {}),
    )[0][0]


@pytest.fixture(scope="module", params=DRAWN)
def pipe(request) -> DiffusionPipeline:
    # DiffusionPipeline picks the class from model_index.json, as any other tool would.
    pipe = DiffusionPipeline.from_pretrained(tiny_checkpoint(request.param))
    assert type(pipe).__name__ == request.param.split("-")[0]
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("name", MARKED)
def test_a_seed_gives_the_same_bytes(name, tmp_path):
    skip_unless_known(name)
    torch.manual_seed(123)
    again = digests(build_tiny_random(name, tmp_path / "again"))
    assert again == digests(tiny_checkpoint(name))
    other = digests(build_tiny_random(name, tmp_path / "other", seed=1))
    weights = [file for file in again if file.endswith(".safetensors")]
    assert weights and all(other[file] != again[file] for file in weights)


@pytest.mark.parametrize("name", MARKED)
def test_building_leaves_the_global_random_state_alone(name, tmp_path):
    skip_unless_known(name)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build_tiny_random(name, tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_weights_are_float32(pipe):
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            assert {parameter.dtype for parameter in component.parameters()} == {torch.float32}


@pytest.mark.parametrize("size", [(32, 48), (64, 32), (16, 16)])
def test_draws_several_sizes(pipe, size):
    assert draw(pipe, height=size[0], width=size[1]).shape[-3:] == (*size, 3)


def test_images_answer_to_seed_and_prompt(pipe):
    image = draw(pipe)
    assert 0.02 < image.std() and ((image > 0) & (image < 1)).mean() > 0.5
    assert abs(image - draw(pipe, seed=1)).mean() > 0.02
    assert abs(image - draw(pipe, prompt="a dog")).mean() > 0.002


def test_qwen_prompt_prefix_is_34_tokens_and_the_prompt_survives():
    pipe = DiffusionPipeline.from_pretrained(tiny_checkpoint("QwenImagePipeline"))
    assert len(pipe.tokenizer(QWEN_IMAGE_PREFIX).input_ids) == pipe.prompt_template_encode_start_idx
    assert pipe.prompt_template_encode.startswith(QWEN_IMAGE_PREFIX)
    prompt = 'Ein Schild mit "407" und 日本語\n<|im_end|>'
    assert pipe.tokenizer.decode(pipe.tokenizer(prompt).input_ids) == prompt


def test_qwen_edit_prompt_prefix_is_64_tokens():
    tokenizer = Qwen2Tokenizer.from_pretrained(tiny_checkpoint("QwenImageEditPlusPipeline") / "tokenizer")
    assert len(tokenizer(QWEN_EDIT_PREFIX).input_ids) == 64


def test_qwen_chat_template_writes_chatml():
    tokenizer = DiffusionPipeline.from_pretrained(tiny_checkpoint("QwenImagePipeline")).tokenizer
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_unknown_name_gets_the_nearest_known_one(tmp_path):
    with pytest.raises(ValueError, match='unknown tiny pipeline "QwenImagePipelin": did you mean "QwenImagePipeline"'):
        build_tiny_random("QwenImagePipelin", tmp_path)


@pytest.mark.parametrize("row", [architectures.as_param(row) for row in PARTICULAR])
def test_what_is_particular_answers_to_seed_prompt_and_images(row):
    pipe = architectures.upstream(row.name)
    first, *others = (
        architectures.draw(pipe, row, i, cfg=True, of=of)[0]
        for i, of in ((0, {}), (0, {"prompt": "a dog"}), (1, {"prompt": architectures.PROMPTS[0]}))
    )
    seen = [dataclasses.replace(row, images=[row.images[2]])] if row.images else []
    others += [architectures.draw(pipe, one, 0, cfg=True)[0] for one in seen]
    for other in others:
        assert (first - other).abs().mean() > 1e-3
