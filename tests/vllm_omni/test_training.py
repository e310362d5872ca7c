"""Two steps of training, with samples that vLLM-Omni draws beside it or in servers."""

import pytest
from e2e_runs import Run, metrics, run_here, run_in_a_fork, settings
from ranks import ready_to_fork
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


def compare(mine: dict, theirs: dict, *more: str) -> None:
    """The embedded engine's numbers but for rounding: the second step shows that the first update arrived."""
    for step in (1, 2):
        for key in ("critic/rewards/mean", "actor/grad_norm", *more):
            assert mine[step][key] == pytest.approx(theirs[step][key], rel=1e-2), (step, key)
        assert mine[step].get("actor/rollout_ratio_max_dev", 0) < 1e-5


def test_two_steps_beside_training(name, tmp_path, monkeypatch):
    """In one process, which vLLM-Omni leaves with all that it has changed there."""
    run = ready_to_fork().Process(
        target=run_in_a_fork, args=(asked(tmp_path, name, f"{A}rollout.name=vllm_omni"), tmp_path)
    )
    run.start()
    run.join(500)
    assert run.exitcode == 0, (tmp_path / "log.txt").read_text()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name), tmp_path / "embedded", monkeypatch)
    compare(metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run"))


@pytest.mark.slow  # the test above has the engine, and the tests of weights what a server does with them
def test_two_steps_through_servers(name, tmp_path, monkeypatch):
    count = 2 if name == "StableDiffusion3Pipeline" else 1
    servers = [f"{A}rollout.name=vllm_omni", f"{A}hybrid_engine=false", f"{A}rollout.n_gpus_per_node={count}"]
    Run(asked(tmp_path, name, *servers), tmp_path).succeed()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name), tmp_path / "embedded", monkeypatch)
    compare(metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run"))


@pytest.mark.slow  # the first test has it in one
def test_two_steps_in_two_training_workers(tmp_path, monkeypatch):
    """Beside training, with a copy of the model in each that each update reaches; validation draws with the same."""
    name, validated = "QwenImagePipeline", ("trainer.test_freq=1", "trainer.val_before_train=true")
    beside = [f"{A}rollout.name=vllm_omni", "trainer.n_gpus_per_node=2"]
    Run(asked(tmp_path, name, *beside, *validated), tmp_path).succeed()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name, *validated), tmp_path / "embedded", monkeypatch)
    mine, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run")
    compare(mine, theirs, *(key for key in theirs[1] if key.startswith("val-")))
