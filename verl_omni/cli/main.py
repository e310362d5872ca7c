"""verl-omni: one command, one file a subcommand. `verl-omni key=value ...` trains."""

import atexit
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Subcommand(NamedTuple):
    module: str  # imported when it is asked for: a help page needs none of them
    summary: str


CLI = "verl_omni.cli."
GROUPS: dict[str, dict[str, Subcommand]] = {
    "To start": {
        "quickstart": Subcommand("verl_omni.quickstart.__main__", "train a small model here in minutes, with a report"),
        "doctor": Subcommand(f"{CLI}doctor", "look at this machine: what is here, what is missing, what to type"),
        "recipes": Subcommand(f"{CLI}recipes", "the settings that come with verl-omni, to train with or to start from"),
        "models": Subcommand(f"{CLI}models", "the models that can be trained"),
        "algorithms": Subcommand(f"{CLI}algorithms", "the algorithms that can train them"),
        "rewards": Subcommand(f"{CLI}rewards", "the rewards, what each needs, and whether it is installed"),
        "tiny": Subcommand(f"{CLI}tiny", "a miniature of a model with random weights, to try settings on"),
    },
    "To prepare": {
        "prepare-ocr": Subcommand(f"{CLI}prepare_ocr", "prompts that quote a text, for the reward `ocr`"),
        "prepare-geneval": Subcommand(f"{CLI}prepare_geneval", "GenEval's prompts, for the reward `geneval`"),
        "prepare-pairs": Subcommand(f"{CLI}prepare_pairs", "encode preference pairs for offline DPO"),
        "score": Subcommand(f"{CLI}score", "try a reward on images that you have"),
        "serve-reward": Subcommand(f"{CLI}serve_reward", "serve rewards to runs on other machines"),
    },
    "To train": {
        "train": Subcommand(f"{CLI}train", "train a model: train [RECIPE] [key=value ...]"),
        "check": Subcommand(f"{CLI}check", "a dry run of `train` with the same settings: one image, one reward"),
        "overfit": Subcommand(f"{CLI}overfit", "train on one prompt: can these settings learn this reward at all?"),
        "plan": Subcommand(f"{CLI}plan", "will a run fit, how long is a step, and how should GPUs be shared out?"),
    },
    "To look at what came of it": {
        "watch": Subcommand(f"{CLI}watch", "a page about runs while they train: images, curves, stop and save"),
        "sample": Subcommand(f"{CLI}sample", "draw images with a run's weights, or a model's"),
        "eval": Subcommand(f"{CLI}eval", "compare a checkpoint, or two, by any rewards: table, win rate, page"),
        "export": Subcommand(f"{CLI}export", "weights for diffusers or ComfyUI: LoRA, or merged into the model"),
        "report": Subcommand("verl_omni.report.report", "write report.html of a run, finished or not"),
    },
    "The command itself": {
        "completion": Subcommand(f"{CLI}completion", "let the shell complete subcommands, recipes and settings"),
    },
}
SUBCOMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main() -> None:
    # What is there at the end goes with the process: Python would look through it all for garbage, a second or two.
    atexit.register(gc.freeze)
    with reader_may_leave():
        name, *rest = sys.argv[1:] or ["--help"]
        if name in SUBCOMMANDS:
            run(name, rest)
        elif name in ("--help", "-h", "help"):
            print(help_page())
        elif re.fullmatch(r"\w[\w-]*", name):  # a word is no setting, option or file
            sys.exit(f"error: {no_subcommand(name)}")
        else:
            run("train", sys.argv[1:])


def run(name: str, arguments: list[str]) -> None:
    """A subcommand as if it had been typed alone: what it says of its usage begins with these two words."""
    sys.argv[:] = [f"verl-omni {name}", *arguments]
    module = importlib.import_module(SUBCOMMANDS[name].module)
    (module.command if hasattr(module, "command") else module.main)()


def help_page() -> str:
    lines = [
        "usage: verl-omni SUBCOMMAND ...",
        "       verl-omni key=value ...              the same as verl-omni train key=value ...",
        "",
        "Reinforcement learning for diffusion models.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"] + [f"  {name:<16} {command.summary}" for name, command in group.items()]
    return "\n".join([*lines, "", "verl-omni SUBCOMMAND --help says more; verl-omni --version tells the version."])


def no_subcommand(name: str) -> str:
    from verl_omni.cli.recipes import shipped
    from verl_omni.utils.suggest import nearest

    if name in shipped():
        return f'"{name}" is a recipe: type verl-omni train {name}'
    hint = nearest(name, SUBCOMMANDS).replace(" Did", ": did", 1)
    return f'unknown subcommand "{name}"{hint or ";"} verl-omni --help lists them'


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """`| head` closes our output when it has read enough: that ends the command, and is no error to tell of."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
        sys.exit(128 + 13)  # as if by SIGPIPE


if __name__ == "__main__":
    main()
