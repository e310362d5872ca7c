"""Two steps of the real trainer on every architecture; every algorithm has its turn. In one process: what Ray does with
them is the same for all. The engine's own tests try all pairs (tests/pipelines/test_matrix.py)."""

import io
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as upstream
from e2e_runs import drawn_again, metrics, prompts, settings
from PIL import Image
from tiny_models import tiny_checkpoint

from verl_omni.testing.local_trainer import local_config, local_trainer

ALGORITHM, LOSS = "actor_rollout_ref.model.algorithm", "actor_rollout_ref.actor.diffusion_loss"
PIPELINE, WINDOW = "actor_rollout_ref.rollout.pipeline", "actor_rollout_ref.rollout.algo"
VIDEO = [f"{PIPELINE}.num_frames=5", "reward.custom_reward_function.path={folder}/brightness.py"]
FULL = ["actor_rollout_ref.model.lora_rank=0"]  # diffusers has no LoRA for LongCat-AudioDiT and ACE-Step
SOUND = [f"{PIPELINE}.height=512", f"{PIPELINE}.width=512", "reward.custom_reward_function.path=null"]
SOUND += ["reward.scorers=[{name: loudness, weight: 1}, {name: silence, weight: 0.5}]"]
SYNC = ["reward.custom_reward_function.path=null", "reward.scorers=[{name: audio_video_sync, weight: 1}]"]
VIDEO_WITH_SOUND = [f"{PIPELINE}.num_frames=5", f"{PIPELINE}.frame_rate=25", *SYNC]
BRIGHTNESS = """
def compute_score(image):
    assert len(image) == 5, "a video is a list of its frames"
    return sum(frame.convert("L").resize((1, 1)).getpixel((0, 0)) for frame in image) / 5 / 255
"""
TWO_REWARDS = """
def compute_score(image):
    bright = image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255
    return {"score": bright, "red": image.resize((1, 1)).getpixel((0, 0))[0]}
"""
GDPO = [
    "algorithm.adv_estimator=gdpo",
    "algorithm.reward_weights={score: 1, red: 0.5}",
    "reward.custom_reward_function.path={folder}/two_rewards.py",
]
RUNS = {
    "QwenImagePipeline": ("flow_grpo", f"{WINDOW}.sde_window_size=1", f"{WINDOW}.sde_window_per_group=true"),
    "QwenImageEditPlusPipeline": ("mix_grpo", f"{WINDOW}.sde_window_size=2", f"{PIPELINE}.true_cfg_scale=2"),
    "StableDiffusion3Pipeline": ("dance_grpo", f"{PIPELINE}.guidance_scale=4.5"),
    "FluxPipeline": ("grpo_guard", f"{PIPELINE}.guidance_scale=3", *GDPO),
    "Flux2Pipeline": ("flow_dppo", f"{PIPELINE}.guidance_scale=4"),
    "Flux2KleinPipeline": ("diffusion_nft", f"{PIPELINE}.guidance_scale=1"),
    "ZImagePipeline": ("awm", f"{PIPELINE}.guidance_scale=0"),
    "LongCatAudioDiTPipeline": ("flow_grpo", f"{PIPELINE}.audio_duration_s=0.02", *FULL, *SOUND),
    "WanPipeline": ("dpo", *VIDEO),
    "WanPipeline-2.2": ("flow_grpo", f"{PIPELINE}.guidance_scale=3", *VIDEO),
}
SELDOM = {
    "LTX2Pipeline-2.3": ("flow_grpo", f"{PIPELINE}.audio_guidance_scale=2", *FULL, *VIDEO_WITH_SOUND),
    "FluxKontextPipeline": ("flow_grpo", f"{PIPELINE}.guidance_scale=3"),
    "ChromaPipeline": ("dpo", f"{PIPELINE}.guidance_scale=4"),
    "Lumina2Pipeline": ("flow_dppo", f"{PIPELINE}.guidance_scale=4"),
    "CogView4Pipeline": ("flow_grpo", f"{PIPELINE}.guidance_scale=4"),
    "HunyuanVideo15Pipeline": ("dance_grpo", f"{PIPELINE}.guidance_scale=4", *VIDEO),
    "WanImageToVideoPipeline-2.2": ("flow_grpo", f"{PIPELINE}.guidance_scale=3", *VIDEO),
    "LTX2ImageToVideoPipeline": ("grpo_guard", f"{WINDOW}.audio_share=0.5", *VIDEO_WITH_SOUND, f"{PIPELINE}.width=64"),
    "AceStepPipeline": ("flow_grpo", f"{PIPELINE}.audio_duration_s=2", *FULL, *SOUND),
    "MiniMaxH3ModularPipeline": ("grpo_guard", f"{WINDOW}.audio_share=0.5", *SYNC, f"{PIPELINE}.num_frames=22"),
}
WITH_IMAGES = {
    "QwenImageEditPlusPipeline", "FluxKontextPipeline", "WanImageToVideoPipeline-2.2", "LTX2ImageToVideoPipeline",
}  # fmt: skip
SOUNDS = {
    "LongCatAudioDiTPipeline": "sound", "AceStepPipeline": "sound",
    "LTX2Pipeline-2.3": "video with sound", "MiniMaxH3ModularPipeline": "video with sound",
}  # fmt: skip
RATIOS = ("flow_grpo", "mix_grpo", "dance_grpo", "grpo_guard", "flow_dppo")


def with_images(folder) -> list[str]:
    """The prompts once more, each with a picture to edit."""
    rng, files = np.random.default_rng(0), []
    for name in ("train", "test"):
        rows = pq.read_table(prompts() / f"{name}.parquet").to_pylist()
        for row in rows:
            png = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(png, "png")
            row["images"] = [{"bytes": png.getvalue()}]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
        files.append(str(folder / f"{name}.parquet"))
    return [f"data.train_files={files[0]}", f"data.val_files={files[1]}"]


@pytest.mark.parametrize("architecture", [*RUNS, *(pytest.param(name, marks=pytest.mark.slow) for name in SELDOM)])
def test_two_steps(architecture, tmp_path, monkeypatch, process_group):
    for name in ("CONDITION_IMAGE_SIZE", "VAE_IMAGE_SIZE"):  # upstream would scale pictures to 1024 x 1024
        monkeypatch.setattr(upstream, name, 64 * 64)
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(64, 64)])
    algorithm, *particular = (given.replace("{folder}", str(tmp_path)) for given in (RUNS | SELDOM)[architecture])
    if architecture in WITH_IMAGES:
        particular += with_images(tmp_path)
    (tmp_path / "brightness.py").write_text(BRIGHTNESS)
    (tmp_path / "two_rewards.py").write_text(TWO_REWARDS)
    run_dir = tmp_path / "run"
    model = tiny_checkpoint(architecture)
    arguments = settings(
        run_dir, f"{ALGORITHM}={algorithm}", "trainer.total_training_steps=2", *particular, model=model
    )
    more = ["actor_rollout_ref.actor.optim.lr=0.01", "data.val_batch_size=1"]
    more += [] if FULL[0] in particular else ["actor_rollout_ref.model.lora_rank=4"]
    local_trainer(local_config([*arguments, *more])).fit()
    seen = metrics(run_dir)
    for step in (1, 2):
        assert math.isfinite(seen[step]["actor/grad_norm"]) and seen[step]["actor/grad_norm"] > 0
        if algorithm in RATIOS:
            assert seen[step]["actor/first_ratio_max_dev"] <= 1e-6
    assert list((run_dir / "global_step_2" / "export").rglob("*.safetensors"))
    if architecture in SOUNDS:  # others: tests/cli/test_weights_of_a_run.py
        assert all(row["kind"] == SOUNDS[architecture] for row in drawn_again(run_dir, 2, at_once=1))
