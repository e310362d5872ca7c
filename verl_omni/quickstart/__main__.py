"""The quickstart: train a small text-to-image model with FlowGRPO to write numbers, and show what it learned.

    verl-omni quickstart [--out DIR] [key=value ...]
    verl-omni quickstart --task think_then_draw        numbers in words: a language model learns to write them as digits
    verl-omni quickstart --task melody                 sound: a small generator learns a melody of four notes

Further arguments are overrides of the training config, such as trainer.total_training_steps=100.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TypeAlias

from verl_omni.utils.options import Parser

Start: TypeAlias = tuple[dict[str, Path], tuple[Path, Path]]

RECIPE = Path(__file__).parent
RUN_DIR = "trainer.default_local_dir="
# What there is to learn: the recipe's name, and what to say of it.
TASKS = {
    "quickstart": (
        "A small Qwen-Image draws three-digit numbers badly. FlowGRPO trains it, with a real OCR as the reward:"
    ),
    "think_then_draw": (
        "A small Qwen-Image that only knows digits is asked for numbers in words. A small language model, which turns "
        "words\ninto digits badly, writes its prompts and learns, with a real OCR of the pictures as the reward:"
    ),
    "melody": (
        "A small LongCat-AudioDiT plays any four notes. FlowGRPO teaches it a melody, with the pitch of what it plays "
        "as the\nreward:"
    ),
}


def main() -> None:
    parser = Parser(
        "verl-omni quickstart", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="folder for all that is written")
    parser.add_argument("--run", help="name of the run (flow_grpo, or the task); each has its own folder")
    parser.add_argument("--task", choices=TASKS, default="quickstart", help="what is learned (%(default)s)")
    options, overrides = parser.parse_known_args()

    from verl_omni.report.report import format_before_after_table, write_report
    from verl_omni.trainer.run_folder.checkpointing import whole_checkpoints

    began = time.time()
    task = options.task
    run_dir = options.out / (options.run or ("flow_grpo" if task == "quickstart" else task))
    if named := [override.removeprefix(RUN_DIR) for override in overrides if override.startswith(RUN_DIR)]:
        if options.run:
            parser.error(f"--run {options.run} and {RUN_DIR}{named[-1]} both name the run's folder: leave one out")
        run_dir = Path(named[-1]).expanduser()
    command = training_command(options.out, run_dir, overrides, task)
    print(f"{TASKS[task]}\n\n    {shown(command)}\n", flush=True)
    code = train(command)
    if code:
        sys.exit(code)
    if not (run_dir / "metrics.jsonl").exists():
        sys.exit(f"error: {run_dir} has no metrics.jsonl to report on: let trainer.logger have jsonl")
    print("\nValidation, before and after\n")
    print(format_before_after_table(run_dir))
    report = run_dir / "report.html"
    longer = training_command(options.out, run_dir, [*overrides, "trainer.total_training_steps=100"], task)
    write_report(run_dir, report, title="verl-omni quickstart", continue_command=shown(longer))
    print(f"\nReport: {report}")
    for checkpoint in list(whole_checkpoints(run_dir).values())[-1:]:  # none with trainer.save_freq=0
        print(f"Trained weights: {checkpoint / 'export'}")
    print(f"Whole quickstart: {time.time() - began:.0f} s. To train on from here:\n\n    {shown(longer)}\n")


def start_quickstart(data_dir: Path) -> Start:
    from verl_omni.quickstart.data import write_data
    from verl_omni.quickstart.task import CHECKPOINT

    return {"model": CHECKPOINT}, write_data(data_dir)


def start_think_then_draw(data_dir: Path) -> Start:
    from verl_omni.quickstart.data import write_data
    from verl_omni.quickstart.task import CHECKPOINT, LANGUAGE_MODEL, words_prompt

    return {"model": CHECKPOINT, "rewriter": LANGUAGE_MODEL}, write_data(data_dir / "words", words_prompt)


def start_melody(data_dir: Path) -> Start:
    from verl_omni.quickstart.data import write_rows
    from verl_omni.quickstart.melody.task import CHECKPOINT, MELODY, PROMPT, TRAIN, VAL, named_notes

    row = (PROMPT, named_notes(MELODY))
    return {"model": CHECKPOINT}, write_rows(data_dir / "melody", "pitch", [row] * TRAIN, [row] * VAL)


# By task: writes the prompts to a folder; (what is loaded from where, the files of prompts).
START = {"quickstart": start_quickstart, "think_then_draw": start_think_then_draw, "melody": start_melody}


def train(command: list[str]) -> int:
    """On a Ctrl-C, which reaches it too, the training saves and ends by itself. A SIGTERM is handed on to it."""
    training = subprocess.Popen(command)
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: training.terminate()),
    }
    code = training.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    return code


def training_command(data_dir: Path, run_dir: Path, overrides: list[str], task: str = "quickstart") -> list[str]:
    """The command that trains what is shipped; the prompts are written to ``data_dir``."""
    models, (train_file, val_file) = START[task](data_dir)
    return [
        sys.executable, "-m", "verl_omni.trainer.main_diffusion",
        "--config-dir", str(RECIPE), "--config-name", task,
        *(f"actor_rollout_ref.{part}.path={folder}" for part, folder in models.items()),
        f"data.train_files={train_file}",
        f"data.val_files={val_file}",
        f"trainer.default_local_dir={run_dir}",
        *overrides,
    ]  # fmt: skip


def shown(command: list[str]) -> str:
    """A command as one would type it."""
    return " \\\n        ".join([" ".join([typed_python(), *command[1:3]]), " ".join(command[3:7]), *command[7:]])


def typed_python() -> str:
    """The interpreter that runs this: `python` in an activated environment, else where it lies."""
    if shutil.which("python") == sys.executable:
        return "python"
    here = Path.cwd()
    return str(Path(sys.executable).relative_to(here) if Path(sys.executable).is_relative_to(here) else sys.executable)


if __name__ == "__main__":
    main()
