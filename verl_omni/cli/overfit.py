"""Train on one prompt: can these settings learn this reward at all?

    verl-omni overfit [RECIPE] [key=value ...] [--steps 30] [--target SCORE]

It takes the first training prompt, draws with the diffusers engine and trains in this process, without Ray, on one
device, in outputs/overfit, which it writes anew each time. The settings can learn if at the end an average image scores
--target; by default, what at first only the best one did. If not, the last line says what was wrong.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from verl_omni.cli.train import with_configuration
from verl_omni.utils.options import Parser, at_least, finite

if TYPE_CHECKING:
    from omegaconf import DictConfig

FOLDER = Path("outputs/overfit")
MEAN, BEST, WORST, GRADIENT = "critic/rewards/mean", "critic/rewards/max", "critic/rewards/min", "actor/grad_norm"
LAST = 3  # steps that are averaged at the end: one alone swings


def main() -> None:
    usage = "verl-omni overfit [RECIPE] [key=value ...] [--steps N] [--target SCORE]"
    parser = Parser(
        "verl-omni overfit", usage=usage, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=at_least(1), default=30, help="training steps (%(default)s)")
    parser.add_argument("--target", type=finite, help="what an image shall score, such as 1 for a reward from 0 to 1")
    options, sys.argv[1:] = parser.parse_known_args()
    with_configuration(lambda config: overfit(config, options.steps, options.target), ("--steps", "--target"))


def overfit(config: "DictConfig", steps: int, target: float | None) -> None:
    from verl_omni.cli.in_process import judge, load_libraries, mistakes_in_one_line, prepared

    load_libraries(config)
    from verl_omni.testing.local_trainer import local_trainer
    from verl_omni.utils.run_files import read_metrics
    from verl_omni.workers.engine.module import quiet_loading

    with mistakes_in_one_line():
        one, prompt = one_prompt(config, prepared(config.copy()), steps)
        quiet_loading()
        shutil.rmtree(FOLDER / "run", ignore_errors=True)
        with judge(one) as address, followed(FOLDER / "run", steps):
            print(f'Training {steps} steps on "{prompt}"', flush=True)
            local_trainer(one, address).fit()
    metrics = [line["data"] for line in read_metrics(FOLDER / "run/metrics.jsonl") if MEAN in line["data"]]
    learned, why = verdict(metrics, target)
    print(why)
    sys.exit(0 if learned else 1)


@contextmanager
def followed(folder: Path, steps: int) -> Iterator[None]:
    """Who looks at the folder sees how far it is, and how it ended."""
    from verl_omni.trainer.progress import tell

    folder.mkdir(parents=True)
    tell(run_dir=str(folder), stage="start", step=0, total=steps, done=0, over=None, last=None, words=None, saves=False)
    try:
        yield
    except BaseException as error:
        tell(over=130 if isinstance(error, KeyboardInterrupt) else 1, words=f"{type(error).__name__}: {error}"[:300])
        raise
    else:
        tell(over=0)
    finally:
        tell(run_dir=None)


def one_prompt(config: "DictConfig", run: "DictConfig", steps: int) -> "tuple[DictConfig, str]":
    """(the configuration of a run on its first prompt, that prompt); `run` is prepared, `config` as typed."""
    from verl_omni.cli.in_process import ARR, alone
    from verl_omni.data.loading import load_datasets

    if run.algorithm.sample_source == "offline":
        raise ValueError("algorithm.sample_source=offline: cached pairs have no reward that could be learned")
    if run.data.train_files is None:
        raise ValueError("data.train_files is not set: overfit trains on its first prompt; name a file of prompts")
    training = run.copy()
    training.trainer.val_only = False
    row = load_datasets(training)[0][0]
    one = {
        "data.train_files": str(write_row(row)),
        "data.val_files": None,
        "data.train_batch_size": 1,
        f"{ARR}actor.ppo_mini_batch_size": 1,
        "trainer.total_training_steps": steps,
        "trainer.val_only": False,
        "trainer.default_local_dir": str(FOLDER / "run"),
        "trainer.logger": ["console", "jsonl"],
        **dict.fromkeys(("trainer.save_freq", "trainer.test_freq", "trainer.save_minutes"), 0),
    }
    return alone(config, one), row["prompt"]


def write_row(row: Mapping[str, Any]) -> Path:
    """The one prompt as a data file."""
    from verl_omni.data.prompt_rows import SIZES

    names = ("prompt", "negative_prompt", "data_source", "images", "extra_info", "agent_name", *SIZES)
    kept = {name: row[name] for name in names if row.get(name) is not None}
    if row["reward_model"].get("ground_truth") is not None:
        kept["reward_model"] = row["reward_model"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "prompt.jsonl"
    path.write_text(json.dumps(kept, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def verdict(steps: Sequence[Mapping[str, float]], target: float | None = None) -> tuple[bool, str]:
    """Whether it has learned, and why not, from the metrics of its steps."""
    first, last = steps[0][MEAN], mean(step[MEAN] for step in steps[-LAST:])
    goal = steps[0][BEST] if target is None else target
    moved = f"from {first:.4f} to {last:.4f} in {len(steps)} steps"
    if all(step[BEST] == step[WORST] for step in steps):
        if target is not None and last >= goal:
            return True, f"Every image scored {last:.4f} from the first step on: there is nothing left to learn"
        return False, (
            f"not learned: all images of a step scored the same ({first:.4f} at first), from which nothing can be "
            "learned; try the reward with `verl-omni score`, more noise (rollout.algo.noise_level) or more images (n)"
        )
    if last >= goal:
        return True, f"Learned: the mean reward went {moved}; the goal was {goal:.4f}"
    if all(step.get(GRADIENT, 1.0) == 0 for step in steps):
        return False, "not learned: the gradient was 0 in every step; is anything trained (lora_rank, target_modules)?"
    swing = max(step[BEST] - step[WORST] for step in steps) / 10
    if last < first - swing:
        return False, f"not learned: the mean reward fell, {moved}; lower actor_rollout_ref.actor.optim.lr"
    if last < first + swing:
        return False, (
            f"not learned: the mean reward hardly moved, {moved}, for a goal of {goal:.4f}; raise "
            "actor_rollout_ref.actor.optim.lr, actor_rollout_ref.rollout.n or --steps"
        )
    return False, f"not yet: the mean reward rose, {moved}, for a goal of {goal:.4f}; give it more --steps"


if __name__ == "__main__":
    main()
