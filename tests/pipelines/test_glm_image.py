"""What is particular to GLM-Image: the tokens that are written before anything is drawn, and its time."""

import json
import shutil

import pytest
import test_architectures as architectures
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, GlmImagePipeline

from verl_omni.config import DiffusionModelConfig
from verl_omni.pipelines.glm_image import GlmImage
from verl_omni.pipelines.glm_image import adapter as module
from verl_omni.pipelines.glm_image.adapter import parts
from verl_omni.pipelines.model_folder import check_model_folder

ROW = next(row for row in architectures.TABLE if row.name == "GlmImagePipeline")


@pytest.mark.slow
def test_each_sample_has_the_tokens_that_diffusers_writes_from_its_seed(monkeypatch):
    """Two prompts of different length, in one batch; diffusers writes for one after the other."""
    monkeypatch.setattr(module, "written_tokens", module.written_tokens.itself)
    model_config, pipe = architectures.config(ROW, cfg=True), ROW.load()
    for name, value in {"top_k": 20, "top_p": 0.9, "temperature": 0.8}.items():
        setattr(pipe.vision_language_encoder.generation_config, name, value)
    tokenizers = GlmImage.load_tokenizers(model_config)
    ids = [GlmImage.tokenize(tokenizers, prompt, 512) for prompt in architectures.PROMPTS]
    found = GlmImage.drawn_conditions(pipe, ids, model_config, seeds=[3, 4], written=[None, None])
    for prompt, seed, one in zip(architectures.PROMPTS, (3, 4), found, strict=True):
        generator = torch.Generator().manual_seed(seed)
        expected, *_ = GlmImagePipeline.generate_prior_tokens.itself(pipe, prompt, 32, 64, generator=generator)
        assert torch.equal(one["image_tokens"][0], expected.reshape(2, 4)[::2, ::2].flatten())


@pytest.mark.parametrize("shape", [{}, {"time_shift_type": "exponential"}, {"use_dynamic_shifting": False, "shift": 3}])
def test_the_time_of_a_noise_level_is_that_of_the_schedule(shape):
    """diffusers shifts the noise levels and leaves the times as they are."""
    model_config = architectures.config(ROW, cfg=True)
    config = FlowMatchEulerDiscreteScheduler.load_config(model_config.path, subfolder="scheduler")
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(config | shape)
    GlmImage.set_timesteps(scheduler, model_config, "cpu")
    found = GlmImage.timestep_at(scheduler.sigmas[:-1], scheduler, model_config)
    torch.testing.assert_close(found, scheduler.timesteps, atol=1e-2, rtol=0)


def test_words_in_quotes_are_tokens_of_their_own():
    tokenizers = GlmImage.load_tokenizers(architectures.config(ROW, cfg=True))
    whole, *words = parts(GlmImage.tokenize(tokenizers, 'a "cat" and “two”', 512))
    pad = tokenizers["tokenizer"].pad_token_id
    assert tokenizers["processor"].tokenizer.decode(whole) == '<|user|>a "cat" and “two”'
    assert [one[0] for one in words] == [pad, pad], "upstream puts one before an even number of them"
    assert [tokenizers["tokenizer"].decode(one, skip_special_tokens=True) for one in words] == ["two", "cat"]


def test_a_negative_prompt_is_refused():
    model_config = architectures.config(ROW, cfg=True)
    with pytest.raises(ValueError, match='negative_prompt="blurry": GLM-Image reads none; leave it out'):
        GlmImage.tokenize_negative(GlmImage.load_tokenizers(model_config), "blurry", 512)
    model_config.pipeline.negative_prompt = "blurry"
    with pytest.raises(ValueError, match="GLM-Image reads none"):
        GlmImage.check(model_config)


@pytest.mark.parametrize("library", ["transformers", "glm_image"])
def test_its_folder_is_looked_at_whichever_library_its_index_names(library, tmp_path):
    """diffusers writes `glm_image`, a module of its own, for a class of transformers' module of that name."""
    shutil.copytree(architectures.tiny_checkpoint(ROW.name), tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    for name in ("processor", "vision_language_encoder"):
        index[name][0] = library
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    model_config = DiffusionModelConfig(path=str(tmp_path))
    check_model_folder(model_config)
    (tmp_path / "vision_language_encoder" / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="vision_language_encoder holds no weights"):
        check_model_folder(model_config)
