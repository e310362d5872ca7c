"""The settings in their order for a reader: which matter first, and what each section is about."""

FIRST = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.model.algorithm",
    "actor_rollout_ref.model.lora_rank",
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "reward.custom_reward_function.path",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.optim.lr",
    "trainer.total_training_steps",
)
SECTIONS = {
    "data": "the prompts",
    "actor_rollout_ref.model": "the model, and what of it is trained",
    "actor_rollout_ref.rollout": "how images are drawn: size, steps, noise, engine",
    "actor_rollout_ref.actor": "the update: optimizer, loss, sharding",
    "actor_rollout_ref.ref": "the reference that a KL term compares with",
    "actor_rollout_ref.rewriter": "a language model that writes the prompts which are drawn",
    "actor_rollout_ref.hybrid_engine": "where the rollout engine sits",
    "algorithm": "advantages and pairs",
    "reward": "which rewards, and what happens when one fails",
    "trainer": "steps, validation, checkpoints, devices, trackers",
    "rollout": "devices of rollout servers",
    "ray": "the cluster",
    "recipe": "what this run is",
}


def is_in(name: str, section: str) -> bool:
    """Whether a setting is in a section, or is all of it."""
    return f"{name}.".startswith(f"{section}.")
