"""Train with rollout servers that draw one step ahead: the ordinary command with `trainer.mode=one_step_off`.

    python -m verl_omni.experimental.one_step_off_policy.main_ppo --config-name one_step_off_ppo_diffusion_trainer \\
        actor_rollout_ref.model.path=... data.train_files=... trainer.n_gpus_per_node=4 rollout.n_gpus_per_node=4

Both `--config-path=config` and `--config-name` may be left out. With a recipe of your own the mode is this one too,
unless you set `trainer.mode`.
"""

import sys
from pathlib import Path

from verl_omni.cli import train

CONFIG = Path(__file__).with_name("config")
NAME = "one_step_off_ppo_diffusion_trainer"


def with_config(arguments: list[str]) -> list[str]:
    """The arguments of the ordinary command: this folder's recipe can be named and is the default, as is its mode."""
    kept = train.without_documented_path(train.with_recipe(arguments))
    given = {argument.split("=")[0] for argument in kept}
    if not given & {"--config-dir", "-cd"}:
        name = [] if given & {"--config-name", "-cn"} else ["--config-name", NAME]
        kept = ["--config-dir", str(CONFIG), *name, *kept]
    return kept if "trainer.mode" in given else [*kept, "trainer.mode=one_step_off"]


def main() -> None:
    sys.argv[1:] = with_config(sys.argv[1:])
    train.command()


if __name__ == "__main__":
    main()
