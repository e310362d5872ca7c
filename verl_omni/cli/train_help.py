"""The settings of a run as a page: those that matter first, a section of them, or all."""

from collections.abc import Iterable

from verl_omni.config.knob import Knob, typed, walk
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.utils.suggest import unknown

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
    "actor_rollout_ref.hybrid_engine": "where the rollout engine sits",
    "algorithm": "advantages and pairs",
    "reward": "which rewards, and what happens when one fails",
    "trainer": "steps, validation, checkpoints, devices, trackers",
    "rollout": "devices of rollout servers",
    "ray": "the cluster",
    "recipe": "what this run is",
}


def help_text(topic: str = "") -> str:
    """With no topic the ten that matter and the names of the sections; `all`, or one section, in full."""
    knobs = {knob.name: knob for knob in walk(DiffusionTrainerConfig)}
    if topic == "all":
        return "\n".join(_section(name, knobs.values()) for name in SECTIONS)
    if topic:
        if topic in knobs:
            return _shown([knobs[topic]])
        inside = [knob for name, knob in knobs.items() if name.startswith(f"{topic}.")]
        if not inside:
            raise ValueError(unknown("section of --help", topic, ["all", *SECTIONS]))
        return _shown(inside)
    counts = {name: sum(_is_in(knob, name) for knob in knobs.values()) for name in SECTIONS}
    listed = [f"  {name:<32} {counts[name]:>3}  {about}" for name, about in SECTIONS.items()]
    return "\n".join(
        [
            "The ten settings that matter, each with its default:\n",
            _shown([knobs[name] for name in FIRST]),
            f"All {len(knobs)}, by section: --help SECTION, or --help all\n",
            *listed,
        ]
    )


def _is_in(knob: Knob, section: str) -> bool:
    return f"{knob.name}.".startswith(f"{section}.")


def _section(name: str, knobs: Iterable[Knob]) -> str:
    return f"{name}: {SECTIONS[name]}\n\n{_shown(knob for knob in knobs if _is_in(knob, name))}"


def _shown(knobs: Iterable[Knob]) -> str:
    return "".join(f"  {knob.name}={typed(knob.default)}\n      {knob.text()}\n" for knob in knobs)
