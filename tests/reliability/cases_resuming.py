"""Going on from a checkpoint with settings that are not those of the run that wrote it."""

import json
import shutil
from pathlib import Path

from faults import COMMON, MOMENTS, interrupted
from inputs import BadInput, row

A = "actor_rollout_ref."
THEME = "Going on from a checkpoint"


def copied(run_dir: Path) -> None:
    shutil.copytree(interrupted(), run_dir)


def changed(name: str, *change: str, says: tuple[str, ...], files: dict | None = None, model=None) -> BadInput:
    """The command of an interrupted run, typed again with a change."""
    own = {"moments.py": MOMENTS.read_text()} | (files or {})
    return BadInput(THEME, name, (*COMMON, *change), says, files=own, earlier=copied, model=model)


def brighter(model: Path) -> None:
    """Other weights of the same shapes."""
    from safetensors.torch import load_file, save_file

    path = model / "transformer/diffusion_pytorch_model.safetensors"
    save_file({k: v * 1.5 for k, v in load_file(path).items()}, path, metadata={"format": "pt"})


OTHER_DATA = "".join(json.dumps(row(f"a dog, number {i}")) + "\n" for i in range(6))
OTHER_REWARD = MOMENTS.read_text().replace("/ 255", "/ 128")

CASES = [
    changed("another algorithm", f"{A}model.algorithm=grpo_guard", says=("algorithm", "grpo_guard")),
    changed("another model of the same shape", says=("model",), model=brighter),
    changed("other prompts, as many", "data.train_files=other.jsonl", says=("data.train_files",),
            files={"other.jsonl": OTHER_DATA}),
    changed("another optimizer", f"{A}actor.optim.optimizer=Adam", says=("optimizer", "Adam")),
    changed("another LoRA rank", f"{A}model.lora_rank=8", says=("lora_rank",)),
    changed("another LoRA alpha", f"{A}model.lora_alpha=8", says=("lora_alpha",)),
    changed("another group size", f"{A}rollout.n=8", says=("rollout.n",)),
    changed("another reward", says=("reward",), files={"moments.py": OTHER_REWARD}),
    changed("another file for the reward", "reward.custom_reward_function.path=mine.py", says=("reward",),
            files={"mine.py": "def compute_score(image):\n    return 1.0\n"}),
    changed("another size of the images", f"{A}rollout.pipeline.height=64", says=("height",)),
    changed("fewer steps than were done", "trainer.total_training_steps=1", says=("total_training_steps",)),
    BadInput(THEME, "resume_path without a path", ("trainer.resume_mode=resume_path",), ("resume_from_path",)),
    BadInput(THEME, "a checkpoint that is not there",
             ("trainer.resume_mode=resume_path", "trainer.resume_from_path=/no/global_step_3"), ("/no/global_step_3",)),
    BadInput(THEME, "a folder that is no checkpoint",
             ("trainer.resume_mode=resume_path", "trainer.resume_from_path={f}/global_step_3"), ("global_step_3",),
             files={"global_step_3/notes.txt": ""}),
]  # fmt: skip
