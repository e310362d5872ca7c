"""A tiny LTX-2 whose sound learns to begin when its picture moves: held-out `audio_video_sync`, and a control.

    python -m benchmarks.sync --out outputs/sync [--seeds 0 1 2] [--parallel 2]

The model is made first (`benchmarks/sync_model.py`): in its clips a picture changes once and a sound begins once, and
the one knows nothing of the other. The control's scores are dealt to the wrong samples. Runs that are already whole
are not repeated. Prints a table in Markdown.
"""

import json
from pathlib import Path

from benchmarks.compare_algorithms import ACTOR, ROLLOUT
from benchmarks.sync_model import PIPELINE, PROMPTS, build
from benchmarks.task_runs import compare
from verl_omni.quickstart.control import dealt
from verl_omni.rewards.scorers.audio_video_sync import compute_score_audio_video_sync

SETTINGS = [
    *(f"{ROLLOUT}.pipeline.{name}={value}" for name, value in PIPELINE.items()),
    "data.train_batch_size=8",
    f"{ROLLOUT}.n=16",
    f"{ROLLOUT}.max_num_seqs=128",
    f"{ROLLOUT}.algo.sde_type=sde",
    f"{ROLLOUT}.algo.noise_level=0.7",
    f"{ROLLOUT}.val_kwargs.n=8",
    f"{ACTOR}.ppo_mini_batch_size=4",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=256",
    f"{ACTOR}.diffusion_loss.clip_ratio=2e-3",
    f"{ACTOR}.optim.lr=1e-3",
    f"{ACTOR}.engine.use_torch_compile=false",
    "algorithm.global_std=false",
    "reward.batch_size=128",
]
RUNS = {
    "flow_grpo": [],
    "control": ["reward.custom_reward_function.path=pkg://benchmarks.sync"],
}


def compute_score(
    videos: list, audios: list, sample_rates: list[int], frame_rates: list[float], extra_infos: list[dict]
) -> list[dict[str, object]]:
    """The control."""
    return dealt(compute_score_audio_video_sync(videos, audios, sample_rates, frame_rates), extra_infos)


def prepare(folder: Path) -> None:
    """The model and the prompts, once for all runs."""
    if not (folder / "model").exists():
        build(folder / "model.unfinished").rename(folder / "model")
    for split, asked in (("val", PROMPTS[::4]), ("train", [p for i, p in enumerate(PROMPTS) if i % 4])):
        rows = [
            {"prompt": prompt, "data_source": "audio_video_sync", "extra_info": {"split": split}} for prompt in asked
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def start(folder: Path) -> list[str]:
    """What names them, and the rest of a run's settings."""
    return [
        f"actor_rollout_ref.model.path={folder / 'model'}",
        f"data.train_files={folder / 'train.jsonl'}",
        f"data.val_files={folder / 'val.jsonl'}",
        *SETTINGS,
    ]


if __name__ == "__main__":
    compare(start, RUNS, 40, __doc__, prepare)
