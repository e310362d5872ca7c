"""Folders as they are published: encoders stored in bfloat16, a model that is drawn with in float32."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_architectures import PROMPTS, TABLE, config, rollout
from vllm_cases import ask, assert_same, vllm_rollout

from verl_omni.utils.json_files import read_object


@pytest.mark.parametrize(
    "name",
    ["QwenImagePipeline", "QwenImageEditPlusPipeline", "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline"],
)
def test_encoders_in_bfloat16(name, tmp_path):
    row = next(row for row in TABLE if row.name == name)
    model_config = config(row, cfg=True, noise=0.7)
    folder = shutil.copytree(model_config.path, tmp_path / "model")
    for encoder in folder.glob("text_encoder*"):
        for file in encoder.glob("*.safetensors"):
            halved = {k: v.bfloat16() if v.is_floating_point() else v for k, v in load_file(file).items()}
            save_file(halved, file, {"format": "pt"})
        settings = read_object(encoder / "config.json") | {"dtype": "bfloat16"}
        (encoder / "config.json").write_text(json.dumps(settings))
    model_config.path = str(folder)
    engine = vllm_rollout(model_config)
    try:
        mine = ask(row, engine, model_config, PROMPTS)
        for one, other in zip(mine, ask(row, rollout(model_config), model_config, PROMPTS), strict=True):
            assert one.conditions["prompt_embeds"].dtype == torch.float32
            assert_same(one, other)
    finally:
        engine.stop()
