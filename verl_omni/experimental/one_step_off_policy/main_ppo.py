"""Train with rollout servers that draw one step ahead: the ordinary command with `trainer.mode=one_step_off`.

    python -m verl_omni.experimental.one_step_off_policy.main_ppo --config-name one_step_off_ppo_diffusion_trainer \\
        actor_rollout_ref.model.path=... data.train_files=... trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=4

Both `--config-path=config` and `--config-name` may be left out.
"""

import sys
from pathlib import Path

from verl_omni.cli import train

CONFIG = Path(__file__).with_name("config")
NAME = "one_step_off_ppo_diffusion_trainer"


def with_config(arguments: list[str]) -> list[str]:
    """The arguments of the ordinary command: this folder's recipes can be named, and this mode's is the default."""
    kept, skip = [], False
    for argument in arguments:
        if skip or argument in ("--config-path", "-cp"):
            skip = not skip
        elif not argument.startswith("--config-path="):  # documents give the folder of this file
            kept.append(argument)
    named = any(argument.split("=")[0] in ("--config-name", "-cn") for argument in kept)
    elsewhere = any(argument.split("=")[0] in ("--config-dir", "-cd") for argument in kept)
    return [
        *([] if elsewhere else ["--config-dir", str(CONFIG)]),
        *([] if named else ["--config-name", NAME]),
        *kept,
    ]


def main() -> None:
    sys.argv[1:] = with_config(sys.argv[1:])
    train.command()


if __name__ == "__main__":
    main()
