"""Prepare the quickstart: a checkpoint to start from (some minutes on a CPU, once) and the prompts.

python -m verl_omni.quickstart.prepare --out DIR
"""

import argparse
import dataclasses
from pathlib import Path
from typing import NamedTuple

from verl_omni.quickstart.checkpoint import Recipe, build_checkpoint, held_out_scores
from verl_omni.quickstart.data import write_data


class Prepared(NamedTuple):
    """What training needs."""

    model: Path
    train_file: Path
    val_file: Path


def prepare(out: str | Path, recipe: Recipe | None = None) -> Prepared:
    """Make ``model/``, ``train.parquet`` and ``val.parquet`` in ``out``; what is there already is not made again."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    return Prepared(build_checkpoint(out / "model", recipe), *write_data(out))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the quickstart's checkpoint and prompts.")
    parser.add_argument("--out", required=True, help="folder for model/, train.parquet and val.parquet")
    parser.add_argument(
        "--steps",
        type=int,
        default=Recipe.transformer_steps,
        help="pre-training steps of the transformer (%(default)s)",
    )
    parser.add_argument("--score", action="store_true", help="then draw the held-out numbers and read them")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("--steps must be 1 or more")
    try:
        prepared = prepare(args.out, dataclasses.replace(Recipe(), transformer_steps=args.steps))
    except FileExistsError as error:
        parser.error(str(error))
    print(*prepared, sep="\n")
    if args.score:
        results = held_out_scores(prepared.model)
        for name in ("score", "exact"):
            print(f"held-out {name}: {sum(result[name] for result in results) / len(results):.3f}")


if __name__ == "__main__":
    main()
