"""A run in a few words: what it is, how far it came, what made it."""

from pathlib import Path

from verl_omni.report.run import Run
from verl_omni.utils.readable import readable

SEEDS = ("trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed")


def title_of(run: Run, unknown: str = "Training report") -> str:
    """What the config says about the run (``recipe``), or its algorithm and model."""
    model, algorithm = (run.setting(f"actor_rollout_ref.model.{name}") for name in ("path", "algorithm"))
    return run.setting("recipe") or (f"{algorithm} on {Path(model).name}" if model else unknown)


def facts(run: Run) -> list[str]:
    """Steps, time and images of the run up to now."""
    if not run.entries:
        return []
    found = [f"{run.entries[-1]['step']} steps"]
    if seconds := run.curve("timing_s/step"):
        found.append(f"{duration(sum(s for _, s in seconds))} of training")
    if images := run.curve("perf/total_num_images"):
        done = "scored" if run.curve("critic/rewards/mean") else "of pairs"
        found.append(f"{sum(n for _, n in images):,.0f} images {done}")
    if run.setting("reward.input") == "latents":
        found.append("training images were not decoded: rewards had latents (reward.input)")
    failed = [sum(n for _, n in run.curve(name)) for name in run.names("val-aux/") if name.endswith("/failed")]
    if sum(failed):
        found.append(f"{sum(failed):.0f} scores of validation failed")
    if best := run.curve("training/best_step"):
        score = run.curve("training/best_score")[-1][1]
        found.append(f"best validation {readable(score)} at step {best[-1][1]:.0f}, which is kept")
    return found


def about(run: Run) -> dict[str, str]:
    """What made this run: enough to make it again."""
    found = {
        "Model": run.setting("actor_rollout_ref.model.path"),
        "Algorithm": run.setting("actor_rollout_ref.model.algorithm"),
        "Training data": run.setting("data.train_files"),
        "Validation data": run.setting("data.val_files"),
        "Reward": function(run, "reward"),
        "Reward of validation": function(run, "reward.validation"),
        "Seeds": ", ".join(f"{name}={run.setting(name)}" for name in SEEDS if run.setting(name) is not None),
    }
    for start in run.starts:
        code = f"verl-omni {start['verl_omni']}" + (f" at {start['code']}" if start.get("code") else "")
        code += f", your commit {start['commit']}" if start["commit"] else ""
        found[f"Started at step {start['step']}"] = f"{start['date']}, {code}, on {start['machine']}"
    return {name: str(said) for name, said in found.items() if said}


def function(run: Run, whose: str) -> str | None:
    """The user's own, where there is one."""
    path = run.setting(f"{whose}.custom_reward_function.path")
    return path and f"{run.setting(f'{whose}.custom_reward_function.name')} in {path}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
