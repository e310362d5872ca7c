"""Rows of the data may ask for sizes of their own: one batch of several is drawn, trained and validated."""

import json
from pathlib import Path

import av
import pytest
from e2e_runs import metrics, settings
from PIL import Image
from tiny_models import tiny_checkpoint

from verl_omni.testing.local_trainer import local_config, local_trainer

IMAGES = [{"height": 32, "width": 48}, {"height": 48, "width": 32}, {}, {"width": 64}]
VIDEOS = [{"num_frames": 5}, {"num_frames": 9}, {"height": 32, "width": 48, "num_frames": 5}, {}]
RUNS = {
    "flow_grpo": ("QwenImagePipeline", IMAGES, ["actor_rollout_ref.actor.use_kl_loss=true"]),
    "flow_grpo of videos": ("WanPipeline", VIDEOS, ["actor_rollout_ref.rollout.pipeline.num_frames=5"]),
    "diffusion_nft": ("QwenImagePipeline", IMAGES, ["algorithm.timestep_distribution=rollout"]),
}

# The mean colour: of an image, or of a video's first frame.
REWARD = """
def compute_score(image):
    first = image[0] if isinstance(image, list) else image
    return sum(first.convert("L").resize((1, 1)).getdata()) / 255
"""


def rows(folder, sizes) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"number {i}"} | size) for i, size in enumerate(sizes)))
    return str(path)


@pytest.mark.parametrize("name", RUNS)
def test_a_batch_of_several_sizes(name, tmp_path):
    model, sizes, more = RUNS[name]
    prompts = rows(tmp_path, sizes)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    arguments = settings(
        tmp_path / "run",
        f"actor_rollout_ref.model.algorithm={name.split()[0]}",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.model.lora_rank=2",
        f"reward.custom_reward_function.path={reward}",
        "trainer.total_training_steps=2",
        *more,
        model=tiny_checkpoint(model),
    )
    trainer = local_trainer(local_config(arguments))
    trainer.fit()
    found = metrics(tmp_path / "run")
    assert list(found) == [0, 1, 2]
    assert found[1]["actor/grad_norm"] > 1e-3 and found[2]["actor/grad_norm"] > 1e-3
    if name.startswith("flow_grpo"):
        assert found[1]["actor/first_ratio_max_dev"] <= 1e-6
    usual = {"height": 32, "width": 32, "num_frames": 5 if model == "WanPipeline" else 1}
    for step in (0, 2):
        drawn = sorted(path for path in (tmp_path / f"run/validation/step_{step}").iterdir() if path.suffix != ".jsonl")
        assert [shape(path) for path in drawn] == [usual | size for size in sizes]


def shape(path: Path) -> dict[str, int]:
    if path.suffix == ".png":
        width, height = Image.open(path).size
        return {"height": height, "width": width, "num_frames": 1}
    with av.open(path) as film:
        frames = list(film.decode(video=0))
    return {"height": frames[0].height, "width": frames[0].width, "num_frames": len(frames)}
