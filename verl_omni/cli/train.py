"""Train a diffusion model with reinforcement learning.

    verl-omni train [RECIPE] [key=value ...]
    verl-omni key=value ...                                          the same without a recipe
    python -m verl_omni.trainer.main_diffusion ...                   the same

RECIPE is a name that `verl-omni recipes` lists, or your own file.yaml; `--config-dir DIR --config-name NAME` is Hydra's
way to say DIR/NAME.yaml. `--cfg job` prints the configuration, `--version` tells the version.
"""

import atexit
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import verl_omni

# Hydra's options whose value is the next word.
TAKE_A_VALUE = {"--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn", "--cfg", "-c", "--package", "-p"}

_forks = False  # workers may be forks of this process: nobody has imported anything else into it

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from omegaconf import DictConfig


def command() -> None:
    """`python -m verl_omni.trainer.main_diffusion`, and `verl-omni`: the run in a process that this one watches."""
    if answer(sys.argv[1:]):
        return
    atexit.register(gc.freeze)  # as in `verl_omni.cli.main`, which is another way to come here
    from verl_omni.cli import supervisor

    supervisor.open_streams()
    if not supervisor.TRACEBACKS and sys.platform == "linux":
        supervisor.watch()
    global _forks
    _forks = True
    main()


def main() -> None:
    """The command in this process, for a launcher of your own."""
    if answer(sys.argv[1:]):
        return
    if not {"--cfg", "-c", "--info", "-i", "--hydra-help"} & {argument.split("=")[0] for argument in sys.argv[1:]}:
        from verl_omni.trainer.progress import say_what_is_waited_for
        from verl_omni.trainer.run_folder.log import terminal

        # Checks load torch and read the data: before anything else, say that there is something going on.
        say_what_is_waited_for(terminal)
        print(f"verl-omni {verl_omni.__version__}: checking the settings, the data and the reward", file=sys.stderr)
    with_configuration(_run)


def with_configuration(task: "Callable[[DictConfig], None]", own: "Iterable[str]" = ()) -> None:
    """Call it with the configuration that the command's arguments make; `own` are options that it has read itself."""
    check_options(sys.argv[1:], own)
    sys.argv[1:] = as_hydra_reads_them(sys.argv[1:])
    import hydra

    from verl_omni.cli import hydra_errors
    from verl_omni.config import schema

    schema.register()
    with hydra_errors.in_one_line(sys.argv[1:]):
        hydra.main("pkg://verl_omni.trainer.config", "diffusion_trainer", version_base=None)(task)()


def answer(arguments: list[str]) -> bool:
    """What needs no run: `--help [all|SECTION]` and `--version`."""
    asked = next((i for i, argument in enumerate(arguments) if argument in ("--help", "-h")), None)
    if asked is not None:
        from verl_omni.cli.main import reader_may_leave
        from verl_omni.cli.train_help import help_text

        topic = arguments[asked + 1] if len(arguments) > asked + 1 else ""
        with reader_may_leave():
            print(__doc__)
            try:
                print(help_text("" if "=" in topic or topic.startswith("-") else topic))
            except ValueError as error:
                sys.exit(f"error: {error}")
    elif {"--version", "-V"} & set(arguments):
        print(f"verl-omni {verl_omni.__version__}")
    else:
        return False
    return True


def _run(config: "DictConfig") -> None:
    from verl_omni.cli import hydra_errors
    from verl_omni.trainer import interrupts
    from verl_omni.trainer.checks.reward_trial import try_first
    from verl_omni.trainer.failures import innermost, one_line, users_mistake
    from verl_omni.trainer.progress import progress
    from verl_omni.trainer.run_folder.log import log_traceback
    from verl_omni.trainer.runner import run_diffusion

    try:
        asked = try_first(config)
        import_checks(config)
        run_diffusion(config, quiet=not hydra_errors.TRACEBACKS, asked=asked)
    except KeyboardInterrupt:
        end(f"stopped by Ctrl-C during the {progress.where()}", interrupts.exit_code())
    except interrupts.Stopped as stopped:
        end(one_line(innermost(stopped)), interrupts.exit_code())
    except Exception as error:
        line = hydra_errors.unset_variable(error) or users_mistake(error)
        if line is None or hydra_errors.TRACEBACKS:
            raise
        if progress.run_dir is not None:
            log_traceback(error)
        end(f"error: {line}", 1)


def import_checks(config: "DictConfig") -> None:
    """What imports make is not garbage. To look for some takes an eighth of their time, and as much after them.

    What a launcher's run before this one has left is: it would be kept for ever with them.
    """
    from omegaconf import OmegaConf

    from verl_omni.trainer import forked
    from verl_omni.workers.rollout import forks

    gc.collect()
    gc.disable()
    try:
        forked.import_libraries()
        own_ray = OmegaConf.select(config, "ray.address") is None
        if _forks and own_ray and forks(OmegaConf.select(config, "actor_rollout_ref.rollout.name")):
            forked.prepare()
        import verl_omni.trainer.checks.preflight  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def end(line: str, code: int) -> None:
    """The last line of a run that did not come to its end, and its exit code."""
    from verl_omni.cli.supervisor import last_words
    from verl_omni.trainer.progress import progress, tell
    from verl_omni.trainer.run_folder.log import terminal

    print(f"{line}{last_words(progress)}", file=terminal(), flush=True)
    tell(over=code, last=None, words=line)
    sys.exit(code)


def as_hydra_reads_them(arguments: list[str]) -> list[str]:
    """The user's arguments, with a line and the end where one of them can be nothing."""
    from verl_omni.config.keys import with_plus

    try:
        arguments = without_documented_path(with_recipe(arguments))
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    check_override_names(arguments)
    return [with_plus(argument) for argument in settings_last(arguments)]


def check_options(arguments: list[str], own: "Iterable[str]" = ()) -> None:
    """Hydra's own message for an option that does not exist names no neighbour."""
    from hydra._internal.utils import get_args_parser

    from verl_omni.utils.options import no_option

    known = {*get_args_parser()._option_string_actions, "--version", "-V"}
    for before, word in zip(["", *arguments], arguments, strict=False):
        name = word.partition("=")[0]
        if word.startswith("-") and name not in known and before not in TAKE_A_VALUE:
            among = [one for one in (*known, *own) if one.startswith("--")]
            sys.exit(f"error: {no_option(name, among)}; a setting is key=value, and --help says what there is")


def with_recipe(arguments: list[str]) -> list[str]:
    """A recipe comes first, as a name or a file; Hydra takes folder and name. It may build on one that is shipped."""
    if not arguments or "=" in arguments[0] or arguments[0].startswith(("-", "+", "~")):
        return arguments
    from verl_omni.cli.recipes import FOLDER, find_recipe

    path = find_recipe(arguments[0]).resolve()
    search = [] if path.parent == FOLDER or "searchpath" in path.read_text() else [f"hydra.searchpath=[{FOLDER}]"]
    return ["--config-dir", str(path.parent), "--config-name", Path(path.name).stem, *search, *arguments[1:]]


def settings_last(arguments: list[str]) -> list[str]:
    """Hydra's parser takes settings in one piece only; a user may type an option between them."""
    options, settings, takes_value = [], [], False
    for argument in arguments:
        is_setting = "=" in argument and not argument.startswith("-") and not takes_value
        (settings if is_setting else options).append(argument)
        takes_value = argument in TAKE_A_VALUE
    return options + settings


def without_documented_path(arguments: list[str]) -> list[str]:
    """Documents type `--config-path=config`, the folder of our own recipes, where Hydra looks anyway."""
    kept = [argument for argument in arguments if argument not in ("--config-path=config", "-cp=config")]
    for i in range(len(kept) - 1):
        if kept[i] in ("--config-path", "-cp") and kept[i + 1] == "config":
            return kept[:i] + kept[i + 2 :]
    return kept


def check_override_names(arguments: list[str]) -> None:
    """Hydra's own message for a key that does not exist names no neighbour, and none comes for `+key`; ours does."""
    from verl_omni.config.keys import check_keys

    keys = [a.split("=")[0].lstrip("+") for a in arguments if "=" in a and not a.startswith(("-", "~"))]
    try:
        check_keys(key for key in keys if not key.startswith("hydra") and "/" not in key and "@" not in key)
    except ValueError as error:
        sys.exit(f"error: {error}")
