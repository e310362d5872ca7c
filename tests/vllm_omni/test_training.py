"""Two steps of training through the command, with samples that servers draw with vLLM-Omni."""

import pytest
from e2e_runs import Run, metrics, run_here, settings
from test_every_architecture import with_images
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

A = "actor_rollout_ref."
STEPS = "trainer.total_training_steps=2"
LORA = [f"{A}model.lora_rank=4", f"{A}actor.optim.lr=0.01"]
BRIGHTNESS = """
def compute_score(image):
    frames = image if isinstance(image, list) else [image]
    return sum(frame.convert("L").resize((1, 1)).getpixel((0, 0)) for frame in frames) / len(frames) / 255
"""
# For every process of a run: upstream would scale pictures to 1024 x 1024.
SMALL_PICTURES = """
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as upstream
upstream.CONDITION_IMAGE_SIZE = upstream.VAE_IMAGE_SIZE = 64 * 64
"""
GUIDED = [f"{A}rollout.pipeline.true_cfg_scale=2", f"{A}rollout.algo.sde_window_size=2"]
RUNS = {
    "QwenImagePipeline": [*LORA, *GUIDED],
    "QwenImageEditPlusPipeline": [*LORA, *GUIDED, f"{A}model.external_lib=small_pictures"],
    "StableDiffusion3Pipeline": [f"{A}actor.optim.lr=0.001"],
    "ZImagePipeline": [*LORA, f"{A}model.algorithm=diffusion_nft", f"{A}rollout.pipeline.guidance_scale=0"],
    "WanPipeline-2.2": [f"{A}actor.optim.lr=0.001", f"{A}rollout.pipeline.num_frames=5"],
}


@pytest.fixture(params=RUNS)
def name(request) -> str:
    return request.param


def asked(folder, name: str, *more: str) -> list[str]:
    (folder / "brightness.py").write_text(BRIGHTNESS)
    (folder / "small_pictures.py").write_text(SMALL_PICTURES)
    reward = f"reward.custom_reward_function.path={folder}/brightness.py"
    data = with_images(folder) if "Edit" in name else []
    return settings(folder / "run", STEPS, reward, *data, *RUNS[name], *more, model=tiny_checkpoint(name))


def test_two_steps_through_servers(name, tmp_path, monkeypatch):
    """The embedded engine's numbers but for rounding: the second step shows that the first update arrived."""
    count = 2 if name == "StableDiffusion3Pipeline" else 1
    servers = [f"{A}rollout.name=vllm_omni", f"{A}hybrid_engine=false", f"{A}rollout.n_gpus_per_node={count}"]
    Run(asked(tmp_path, name, *servers), tmp_path).succeed()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name), tmp_path / "embedded", monkeypatch)
    mine, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run")
    for step in (1, 2):
        for key in ("critic/rewards/mean", "actor/grad_norm"):
            assert mine[step][key] == pytest.approx(theirs[step][key], rel=1e-2), (step, key)
        assert mine[step].get("actor/rollout_ratio_max_dev", 0) < 1e-5


def test_two_steps_in_two_training_workers(tmp_path, monkeypatch):
    """Beside training, with a copy of the model in each that each update reaches; validation draws with the same."""
    name, validated = "QwenImagePipeline", ("trainer.test_freq=1", "trainer.val_before_train=true")
    beside = [f"{A}rollout.name=vllm_omni", "trainer.n_gpus_per_node=2"]
    Run(asked(tmp_path, name, *beside, *validated), tmp_path).succeed()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name, *validated), tmp_path / "embedded", monkeypatch)
    mine, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run")
    for step in (1, 2):
        for key in ("critic/rewards/mean", "actor/grad_norm", *(key for key in theirs[step] if key.startswith("val-"))):
            assert mine[step][key] == pytest.approx(theirs[step][key], rel=1e-2), (step, key)
        assert mine[step]["actor/rollout_ratio_max_dev"] < 1e-5
