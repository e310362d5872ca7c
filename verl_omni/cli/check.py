"""A dry run: all that `verl-omni train` with the same settings would do, up to one image drawn and one reward asked.

    verl-omni check [RECIPE] [key=value ...]

It runs in this process, without Ray, on one device, and draws with the run's engine, beside the training whatever
trainer.mode says. The image is written to outputs/check; the run's own folder is left alone.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_omni.cli.train import with_configuration

if TYPE_CHECKING:
    from omegaconf import DictConfig

FOLDER = Path("outputs/check")


def main() -> None:
    if {"--help", "-h"} & set(sys.argv[1:]):
        print(f"usage: verl-omni check [RECIPE] [key=value ...]\n\n{__doc__}")
        return
    with_configuration(check)


def check(config: "DictConfig") -> None:
    from verl_omni.cli.in_process import judge, load_libraries, mistakes_in_one_line, prepared, step

    load_libraries(config)
    from verl_omni.trainer.checks.preflight import check_start

    with mistakes_in_one_line():
        with step("settings, data and rewards"):
            run = prepared(config.copy())
            start = check_start(run)
        for line in start.notices:
            print(line)
        if run.algorithm.sample_source == "offline":
            print("The cached pairs fit the model. Offline training draws no image and asks no reward.")
            return
        one = one_image(config, run)
        with judge(one) as address:
            draw(one, address)


def one_image(config: "DictConfig", run: "DictConfig") -> "DictConfig":
    """The configuration of a validation of a single image by the run's engine; `run` is prepared, `config` as typed."""
    from verl_omni.cli.in_process import ARR, alone
    from verl_omni.workers.rollout import engine_class

    rollout = run.actor_rollout_ref.rollout
    if (by := run.reward.pairwise.by) in ("pair", "group"):
        raise ValueError(
            f"reward.pairwise.by={by} compares images, and a check draws one; the rest is as it should be: go on with "
            "`verl-omni overfit --steps 1` and the same settings"
        )
    one = {
        "data.val_files": run.data.val_files or run.data.train_files,
        "data.val_max_samples": 1,
        "trainer.val_only": True,
        "trainer.default_local_dir": str(FOLDER),
        f"{ARR}rollout.name": rollout.name,
        f"{ARR}rollout.engine_kwargs": rollout.engine_kwargs,
        f"{ARR}rollout.compile_vae": False if "compile_vae" in engine_class(rollout.name).reads else None,
        f"{ARR}rollout.val_kwargs": {"n": 1, "seed": rollout.val_kwargs.seed},
    }
    return alone(config, one)


def draw(config: "DictConfig", judge: str | None = None) -> None:
    from verl_omni.cli.in_process import step
    from verl_omni.report.galleries import file_of
    from verl_omni.testing.local_trainer import local_trainer
    from verl_omni.workers.engine.module import quiet_loading

    quiet_loading()
    with step("the model and the rewards, loaded"):
        trainer = local_trainer(config, judge)
    with step("one image, drawn and scored"):
        trainer.validate()
    folder = FOLDER / "validation/step_0"
    (row,) = (json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines())
    told = {name: value for name, value in row["reward_extra_info"].items() if isinstance(value, int | float | str)}
    print(f'\nPrompt: "{row["prompt"]}"\nImage:  {folder / file_of(row)}\nScore:  {row["score"]:.4f}', end="")
    print("".join(f", {name}: {value}" for name, value in told.items()) + "\nA run with these settings can start.")


if __name__ == "__main__":
    main()
