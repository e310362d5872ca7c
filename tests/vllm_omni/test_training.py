"""Two steps of training, with samples that vLLM-Omni draws beside it or in servers."""

import pytest
from e2e_runs import QuickRun, Run, metrics, run_here, run_in_a_fork, settings
from ranks import ready_to_fork
from test_every_architecture import with_images
from tiny_models import tiny_checkpoint

pytestmark = pytest.mark.timeout(1500)  # whole runs, on a machine that may be busy

A = "actor_rollout_ref."
STEPS = "trainer.total_training_steps=2"
TRAINED = {"lora": [f"{A}model.lora_rank=4", f"{A}actor.optim.lr=0.01"], "full": [f"{A}actor.optim.lr=0.001"]}
# Of all pixels: rounded to one of 256 it would jump where a last bit of two engines differs.
BRIGHTNESS = """
import numpy as np
def compute_score(image):
    frames = image if isinstance(image, list) else [image]
    return float(np.mean([np.asarray(frame.convert("L")) for frame in frames])) / 255
"""
# For every process of a run: upstream would scale pictures to 1024 x 1024.
SMALL_PICTURES = """
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as upstream
upstream.CONDITION_IMAGE_SIZE = upstream.VAE_IMAGE_SIZE = 64 * 64
"""
GUIDED = [f"{A}rollout.pipeline.true_cfg_scale=2", f"{A}rollout.algo.sde_window_size=2"]
RUNS = {
    "QwenImagePipeline": GUIDED,
    "QwenImageEditPlusPipeline": [*GUIDED, f"{A}model.external_lib=small_pictures"],
    "StableDiffusion3Pipeline": [],
    "ZImagePipeline": [f"{A}model.algorithm=diffusion_nft", f"{A}rollout.pipeline.guidance_scale=0"],
    "WanPipeline-2.2": [f"{A}rollout.pipeline.num_frames=5"],
}
ALL = [(name, trained) for name in RUNS for trained in TRAINED]
# One of the two for each model is enough to see that its weights get there; the other is run with the slow tests.
QUICK = {
    ("QwenImagePipeline", "lora"), ("QwenImageEditPlusPipeline", "lora"), ("StableDiffusion3Pipeline", "full"),
    ("ZImagePipeline", "lora"), ("WanPipeline-2.2", "full"),
}  # fmt: skip


def asked(folder, name: str, trained: str, *more: str) -> list[str]:
    (folder / "brightness.py").write_text(BRIGHTNESS)
    (folder / "small_pictures.py").write_text(SMALL_PICTURES)
    reward = f"reward.custom_reward_function.path={folder}/brightness.py"
    data = with_images(folder) if "Edit" in name else []
    given = [STEPS, reward, *data, *TRAINED[trained], *RUNS[name], *more]
    return settings(folder / "run", *given, model=tiny_checkpoint(name))


def compare(mine: dict, theirs: dict, *more: str) -> None:
    """The embedded engine's numbers but for rounding: the second step shows that the first update arrived."""
    for step in (1, 2):
        for key in ("critic/rewards/mean", "actor/grad_norm", *more):
            assert mine[step][key] == pytest.approx(theirs[step][key], rel=1e-2), (step, key)
        assert mine[step].get("actor/rollout_ratio_max_dev", 0) < 1e-5


@pytest.mark.parametrize(
    ("name", "trained"), [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in ALL]
)
def test_two_steps_beside_training(name, trained, tmp_path, monkeypatch):
    """In one process, which vLLM-Omni leaves with all that it has changed there."""
    run = ready_to_fork().Process(
        target=run_in_a_fork, args=(asked(tmp_path, name, trained, f"{A}rollout.name=vllm_omni"), tmp_path)
    )
    run.start()
    run.join(500)
    assert run.exitcode == 0, (tmp_path / "log.txt").read_text()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name, trained), tmp_path / "embedded", monkeypatch)
    compare(metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run"))


@pytest.mark.slow  # the test above has the engine, and the tests of weights what a server does with them
@pytest.mark.parametrize(("name", "trained"), ALL)
def test_two_steps_through_two_servers(name, trained, tmp_path, monkeypatch):
    servers = [f"{A}rollout.name=vllm_omni", f"{A}hybrid_engine=false", f"{A}rollout.n_gpus_per_node=2"]
    QuickRun(asked(tmp_path, name, trained, *servers), tmp_path).succeed()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name, trained), tmp_path / "embedded", monkeypatch)
    compare(metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run"))


@pytest.mark.slow  # the first test has it in one
def test_two_steps_in_two_training_workers(tmp_path, monkeypatch):
    """Beside training, with a copy of the model in each that each update reaches; validation draws with the same."""
    name, validated = "QwenImagePipeline", ("trainer.test_freq=1", "trainer.val_before_train=true")
    beside = [f"{A}rollout.name=vllm_omni", "trainer.n_gpus_per_node=2"]
    Run(asked(tmp_path, name, "lora", *beside, *validated), tmp_path).succeed()
    (tmp_path / "embedded").mkdir()
    run_here(asked(tmp_path / "embedded", name, "lora", *validated), tmp_path / "embedded", monkeypatch)
    mine, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "embedded/run")
    compare(mine, theirs, *(key for key in theirs[1] if key.startswith("val-")))
