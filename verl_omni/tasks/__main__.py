"""Make all that a task needs: prompts, and a generator that is trained from scratch.

    python -m verl_omni.tasks make scenes FOLDER [--seconds 300] [--target 0.6]     # minutes on one GPU
    python -m verl_omni.tasks make scenes ANOTHER --begun FOLDER/model              # goes on where it ended too early
    python -m verl_omni.tasks make scenes FOLDER --small                            # on a CPU: it learns nothing

The last line is the command that trains it.
"""

import argparse
import sys
from pathlib import Path

from verl_omni.utils.options import Parser, above_zero, at_least, finite

TASKS = ("scenes", "words", "signs")


def main() -> None:
    parser = Parser(
        "python -m verl_omni.tasks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["make"])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("folder", type=Path, help="folder to write: model/, train.jsonl, val.jsonl")
    ends = "training ends after so long, once the VAE is trained (%(default)s)"
    parser.add_argument("--seconds", type=above_zero, default=300, help=ends)
    parser.add_argument("--target", type=finite, default=0.6, help="or when so much is drawn right (%(default)s)")
    parser.add_argument("--seed", type=at_least(0), default=0, help="of data and weights (%(default)s)")
    parser.add_argument("--begun", type=Path, help="a model made before, to train on; its VAE stays as it is")
    parser.add_argument("--small", action="store_true", help="a generator that a CPU trains in seconds")
    options = parser.parse_args()
    from verl_omni.tasks import find_task
    from verl_omni.tasks.generator import SMALL, make_generator, size_of, write_rows

    task = find_task(options.task)
    size = SMALL if options.small else size_of(task)
    try:
        given = (size, options.seconds, options.target, options.seed, options.begun)
        make_generator(task, options.folder / "model", *given)
    except (FileExistsError, NotADirectoryError) as error:
        sys.exit(f"error: {error}")
    write_rows(task, options.folder)
    recipe = Path(__file__).with_name(f"{options.task}.yaml")
    print(
        f"verl-omni train {recipe} actor_rollout_ref.model.path={options.folder}/model "
        f"data.train_files={options.folder}/train.jsonl data.val_files={options.folder}/val.jsonl"
    )


if __name__ == "__main__":
    main()
