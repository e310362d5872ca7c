"""Compare a checkpoint, or two side by side, on prompts and by rewards of your choice.

    verl-omni eval outputs/run --prompts test.txt --scorer pickscore
    verl-omni eval /models/Qwen-Image outputs/run --prompts test.jsonl --scorer ocr --scorer aesthetic --seeds 0 1 2

Both draw the same prompts with the same seeds. Prints each reward's mean and, of two, how often the second wins (a tie
counts half); writes the images, their scores and a page with all of them. A run with a rewriter draws what that makes
of the prompts; a model alone draws them as they are.
"""

import argparse
import sys
from collections.abc import Sequence
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING

from verl_omni.cli.draw_options import add_options, read_prompts, read_settings
from verl_omni.cli.scorer_options import add_scorers, read_rewards
from verl_omni.cli.tables import aligned
from verl_omni.utils.options import Parser

if TYPE_CHECKING:
    from verl_omni.rewards.by_hand import Sample


def main() -> None:
    parser = Parser(
        "verl-omni eval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", metavar="RUN|CHECKPOINT|MODEL", nargs="+", help="one folder, or two to compare")
    add_options(parser)
    add_scorers(parser, "--scorer-set")
    parser.add_argument("--out", default="eval", help="folder for all that is written (%(default)s)")
    options = parser.parse_args()
    if len(options.weights) > 2:
        parser.error("one or two folders are compared, not more")
    try:
        sys.exit(_run(options))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


def _run(options: argparse.Namespace) -> int:
    from verl_omni.cli.trained import drawing_settings, find_weights
    from verl_omni.rewards.by_hand import Sample, read_samples
    from verl_omni.utils.external_lib import import_external_lib

    import_external_lib(options.external_lib, "--external-lib")
    rewards, prompts = read_rewards(options, "--scorer-set"), read_prompts(options)
    asked = [Sample(Path(f'the prompt "{p.text[:60]}"'), p.text, p.ground_truth) for p in prompts]
    rewards.check(asked, "give the prompts a column ground_truth, or choose another reward")
    found = [find_weights(place, options.model) for place in options.weights]
    # A model alone has no settings of its own here: both draw as the run did.
    common = next((settings for weights in found if (settings := drawing_settings(weights))), {})
    from verl_omni.cli.painter import Painter
    from verl_omni.cli.sample import draw_all
    from verl_omni.workers.engine.module import quiet_loading

    quiet_loading()
    names = [weights.name for weights in found]
    if len(set(names)) < len(names):
        names = [str(Path(place)) for place in options.weights]
    drawn: list[list[Sample]] = []
    for number, (weights, name) in enumerate(zip(found, names, strict=True)):
        folder = Path(options.out) / f"images_{number + 1}"
        painter = Painter(weights, {**common, **read_settings(options.set)}, options.device)
        _, kept = draw_all(painter, prompts, options.seeds, options.batch_size, folder, name)
        del painter  # two at once may not fit
        samples = read_samples(folder / "samples.jsonl")
        for sample, response in zip(samples, kept, strict=True):
            sample.response = response
        rewards.score(samples, options.batch_size)
        for sample in samples:
            sample.response = None
        del kept  # the videos of two models may not fit either
        drawn.append(samples)
    failed = sum(sample.score(label) is None for samples in drawn for sample in samples for label in rewards.labels)
    print(comparison(drawn, names, rewards.labels))
    print(f"Page: {_page(Path(options.out), drawn, names, rewards.labels)}")
    if failed:
        print(f"{failed} scores failed; their images are left out of the table", file=sys.stderr)
    return int(failed > 0)


def comparison(drawn: Sequence[Sequence["Sample"]], names: Sequence[str], labels: Sequence[str]) -> str:
    """One row a reward, over the images that all of them have a score of."""
    header = ["reward", *names] + (["difference", "second wins"] if len(names) == 2 else []) + ["images"]
    rows = [header]
    for label in labels:
        scored = [row for row in zip(*[[s.score(label) for s in samples] for samples in drawn], strict=True)]
        scored = [row for row in scored if None not in row]
        if not scored:
            rows.append([label, *["-"] * (len(header) - 2), "0"])
            continue
        cells = [f"{mean(column):.4f}" for column in zip(*scored, strict=True)]
        if len(names) == 2:
            gains = [second - first for first, second in scored]
            error = f" ± {stdev(gains) / sqrt(len(gains)):.4f}" if len(gains) > 1 else ""
            wins = mean(1.0 if gain > 0 else 0.5 if gain == 0 else 0.0 for gain in gains)
            cells += [f"{mean(gains):+.4f}{error}", f"{wins:.0%}"]
        rows.append([label, *cells, str(len(scored))])
    return aligned(rows)


def _page(out: Path, drawn: Sequence[Sequence["Sample"]], names: Sequence[str], labels: Sequence[str]) -> Path:
    from verl_omni.cli.score import shown
    from verl_omni.report.contact_sheet import Shot, Tile, write_contact_sheet

    tiles = []
    for row in zip(*drawn, strict=True):
        shots = [Shot(s.file, name, shown(s, list(labels))) for s, name in zip(row, names, strict=True)]
        tiles.append(Tile(row[0].prompt, shots, row[0].ground_truth))
    facts = f"{len(tiles)} prompts and seeds, in their order"
    return write_contact_sheet(out / "eval.html", " and ".join(names), facts, tiles)


if __name__ == "__main__":
    main()
