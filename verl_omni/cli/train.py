"""Train a diffusion model with reinforcement learning.

    verl-omni actor_rollout_ref.model.path=... data.train_files=... [key=value ...]
    python -m verl_omni.trainer.main_diffusion ...      the same

Other subcommands are `verl-omni plan`, `report`, `serve-reward` and `prepare-pairs`.

`--help` lists every knob, `--cfg job` prints the configuration, `--config-dir DIR --config-name RECIPE` runs a recipe,
`--version` tells the version.
"""

import sys

import hydra
from omegaconf import DictConfig

import verl_omni
from verl_omni.cli import hydra_errors, supervisor
from verl_omni.cli.supervisor import last_words
from verl_omni.config import schema
from verl_omni.config.keys import check_keys, with_plus
from verl_omni.trainer import interrupts
from verl_omni.trainer.failures import innermost, one_line, users_mistake
from verl_omni.trainer.progress import progress, tell
from verl_omni.trainer.run_log import log_traceback, terminal
from verl_omni.trainer.runner import run_diffusion


@hydra.main(config_path="pkg://verl_omni.trainer.config", config_name="diffusion_trainer", version_base=None)
def _hydra_main(config: DictConfig) -> None:
    try:
        run_diffusion(config, quiet=not hydra_errors.TRACEBACKS)
    except KeyboardInterrupt:
        end(f"stopped by Ctrl-C during the {progress.where()}", interrupts.exit_code())
    except interrupts.Stopped as stopped:
        end(one_line(innermost(stopped)), interrupts.exit_code())
    except Exception as error:
        line = users_mistake(error)
        if line is None or hydra_errors.TRACEBACKS:
            raise
        if progress.run_dir is not None:
            log_traceback(error)
        end(f"error: {line}", 1)


def end(line: str, code: int) -> None:
    """The last line of a run that did not come to its end, and its exit code."""
    print(f"{line}{last_words(progress)}", file=terminal(), flush=True)
    tell(over=code, last=None)
    sys.exit(code)


def command() -> None:
    """`python -m verl_omni.trainer.main_diffusion`, and `verl-omni`: the run in a process that this one watches."""
    if not hydra_errors.TRACEBACKS and sys.platform == "linux":
        supervisor.watch()
    main()


def main() -> None:
    """The command in this process, for a launcher of your own."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        print_help()
        return
    if {"--version", "-V"} & set(sys.argv[1:]):
        print(f"verl-omni {verl_omni.__version__}")
        return
    if not {"--cfg", "-c", "--info", "-i", "--hydra-help"} & {argument.split("=")[0] for argument in sys.argv[1:]}:
        # Checks load torch and read the data: before anything else, say that there is something going on.
        print(f"verl-omni {verl_omni.__version__}: checking the settings, the data and the reward", file=sys.stderr)
    check_override_names(sys.argv[1:])
    sys.argv[1:] = [with_plus(argument) for argument in without_documented_path(sys.argv[1:])]
    with hydra_errors.in_one_line(sys.argv[1:]):
        _hydra_main()


def without_documented_path(arguments: list[str]) -> list[str]:
    """Documents type `--config-path=config`, the folder of our own recipes, where Hydra looks anyway."""
    kept = [argument for argument in arguments if argument not in ("--config-path=config", "-cp=config")]
    for i in range(len(kept) - 1):
        if kept[i] in ("--config-path", "-cp") and kept[i + 1] == "config":
            return kept[:i] + kept[i + 2 :]
    return kept


def print_help() -> None:
    from verl_omni.config.knob import typed, walk

    print(__doc__)
    for knob in walk(schema.DiffusionTrainerConfig):
        print(f"  {knob.name}={typed(knob.default)}\n      {knob.text()}")


def check_override_names(arguments: list[str]) -> None:
    """Hydra's own message for a key that does not exist names no neighbour, and none comes for `+key`; ours does."""
    keys = [a.split("=")[0].lstrip("+") for a in arguments if "=" in a and not a.startswith(("-", "~"))]
    try:
        check_keys(key for key in keys if not key.startswith("hydra") and "/" not in key and "@" not in key)
    except ValueError as error:
        sys.exit(f"error: {error}")
