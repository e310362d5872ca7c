"""Qwen-Image-Edit-2511: reference images are modulated as at timestep 0, which the transformer's config says."""

import json
import shutil

import pytest
import torch
from test_architectures import PROMPTS, TABLE, as_batch, config, draw, rollout, training_engine
from vllm_cases import ask, assert_same, vllm_rollout

from verl_omni.utils.json_files import read_object

ROW = next(row for row in TABLE if row.name == "QwenImageEditPlusPipeline")


@pytest.fixture(scope="module")
def model_config(tmp_path_factory):
    model_config = config(ROW, cfg=True, noise=0.7)
    folder = shutil.copytree(model_config.path, tmp_path_factory.mktemp("2511") / "model")
    said = folder / "transformer/config.json"
    said.write_text(json.dumps(read_object(said) | {"zero_cond_t": True}))
    model_config.path = str(folder)
    return model_config


@pytest.fixture(scope="module")
def engine(model_config):
    engine = vllm_rollout(model_config)
    yield engine
    engine.stop()


def test_without_noise_it_is_diffusers(model_config, engine):
    pipe = ROW.load(model_config.path)
    assert pipe.transformer.config.zero_cond_t
    for i, output in enumerate(ask(ROW, engine, model_config, PROMPTS, noise_level=0.0, sde_window=None)):
        latents, _ = draw(pipe, ROW, i, cfg=True)
        torch.testing.assert_close(output.trajectory["final_latents"][None], latents, atol=1e-5, rtol=1e-5)


def test_with_noise_it_is_the_embedded_engine_and_training(model_config, engine):
    prompts = [*PROMPTS, "a dog"]
    mine = ask(ROW, engine, model_config, prompts)
    for one, other in zip(mine, ask(ROW, rollout(model_config), model_config, prompts), strict=True):
        assert_same(one, other)
    training, data = training_engine(model_config), as_batch(mine)
    with training.train_mode():
        replayed = training.infer_batch(data)["model_output"]["log_probs"].view_as(data["rollout_log_probs"])
    torch.testing.assert_close(replayed, data["rollout_log_probs"], atol=1e-5, rtol=0)
