"""The two guides, followed to the letter: their files in a folder of the user's, one command, no edit here."""

import re
import subprocess
from pathlib import Path

import pytest
import torch
import warm
from e2e_runs import metrics, run_here, settings

from verl_omni.testing.tiny_random import image_vae, strengthen
from verl_omni.testing.tiny_text import t5_encoder, t5_tokenizer

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

DOCS = Path(__file__).parents[2] / "docs"


def blocks(guide: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / guide).read_text(), flags=re.S)


def flags(command: str) -> list[str]:
    """The settings of a guide's command, without those that stand for the reader's own."""
    return [flag for flag in re.findall(r"[\w.]+=\S+", command) if not flag.startswith(("PYTHONPATH", "data."))]


def test_a_new_algorithm(tmp_path, monkeypatch, process_group):
    guide = "integrating_a_new_policy_gradient_algorithm_for_diffusion_model.md"
    (code,) = blocks(guide, "python")
    (command,) = [block for block in blocks(guide, "bash") if "verl-omni train" in block]
    assert "actor_rollout_ref.model.algorithm=soft_grpo" in flags(command)
    (tmp_path / "soft_grpo.py").write_text(code)
    run_here(settings("run", *flags(command), "trainer.total_training_steps=1"), tmp_path, monkeypatch)
    found = metrics(tmp_path / "run")[1]
    assert found["actor/grad_norm"] > 0
    # Ranks of four images are spread over [-1, 1]: Flow-GRPO's own estimator would go beyond.
    assert found["critic/advantages/max"] == 1 and found["critic/advantages/min"] == -1
    written = (tmp_path / "run/config.yaml").read_text()
    assert "sde_type: fading_sde" in written and "penalty: 20" in written


@pytest.fixture(scope="module")
def aura_flow_model(tmp_path_factory) -> Path:
    from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler

    torch.manual_seed(0)
    tokenizer = t5_tokenizer()
    transformer = AuraFlowTransformer2DModel(
        sample_size=16,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=256,
    )
    strengthen(transformer, 2.0)
    folder = tmp_path_factory.mktemp("aura-flow-model")
    AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=t5_encoder(tokenizer, "UMT5"),
        vae=image_vae(scaling_factor=0.4),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.7),
    ).save_pretrained(folder)
    return folder


def test_a_new_model(tmp_path, aura_flow_model, monkeypatch, process_group):
    guide = "integrating_a_diffusion_model.md"
    code, check = blocks(guide, "python")
    (command,) = blocks(guide, "bash")
    (tmp_path / "aura_flow.py").write_text(code)
    (tmp_path / "check_aura_flow.py").write_text(check)
    done = subprocess.run(
        [*warm.quick_python(), "check_aura_flow.py", str(aura_flow_model)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"largest difference of a pixel: [01]\.\d\d of 255", done.stdout)

    own = [flag for flag in flags(command) if "model.path" not in flag]
    assert own == ["actor_rollout_ref.model.external_lib=aura_flow.py"]
    more = ["actor_rollout_ref.rollout.pipeline.max_sequence_length=64", "trainer.total_training_steps=1"]
    lora = ["actor_rollout_ref.model.lora_rank=4"]
    run_here(settings("run", *own, *more, *lora, model=aura_flow_model), tmp_path, monkeypatch)
    found = metrics(tmp_path / "run")[1]
    assert found["actor/grad_norm"] > 0 and found["actor/first_ratio_max_dev"] <= 2e-6
    assert (tmp_path / "run/global_step_1/export/pytorch_lora_weights.safetensors").is_file()
