"""The settings of a run that takes seconds."""

from tiny_models import tiny_checkpoint

REWARD = "def compute_score(image):\n    return sum(image.getpixel((0, 0))) / 765\n"
SETTINGS = {
    "actor_rollout_ref.rollout.pipeline.height": 32,
    "actor_rollout_ref.rollout.pipeline.width": 32,
    "actor_rollout_ref.rollout.pipeline.num_inference_steps": 3,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "data.train_batch_size": 2,
    "trainer.device": "cpu",
}


def tiny_settings(folder, **more) -> list[str]:
    """Of a run in a folder that holds prompts.txt and mine.py."""
    (folder / "prompts.txt").write_text("a cat\na dog\na cow\n")
    (folder / "mine.py").write_text(REWARD)
    given = SETTINGS | {
        "actor_rollout_ref.model.path": tiny_checkpoint(),
        "data.train_files": folder / "prompts.txt",
        "reward.custom_reward_function.path": folder / "mine.py",
        "trainer.default_local_dir": folder / "run",
    }
    return [f"{name}={value}" for name, value in (given | more).items()]
