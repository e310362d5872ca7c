"""Try a reward on images, videos or sounds that you have, before a run spends days on it.

    verl-omni score --scorer ocr images/*.png --ground-truth "OPEN"
    verl-omni score --scorer ocr --samples outputs/run/validation/step_50/samples.jsonl
    verl-omni score --scorer pickscore --set pickscore.model=/models/pickscore images/ --prompts prompts.txt
    verl-omni score --function my_reward.py:compute_score images/ --prompt "a red cube"
    verl-omni score --scorers "[{name: ocr}, {name: aesthetic, weight: 0.1}]" images/ --ground-truth "OPEN"

Prints a table and writes a page with the files, the best first. With --pairs it also writes the best and the worst
image of each prompt, as rows for `verl-omni prepare-pairs`.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from verl_omni.cli.scorer_options import add_scorers, read_rewards
from verl_omni.utils.options import Parser, at_least

if TYPE_CHECKING:
    from verl_omni.rewards.by_hand import Sample

SHOWN = 40  # rows of the table; the page has all


def main() -> None:
    options = _parser().parse_args()
    try:
        sys.exit(_run(options))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "verl-omni score", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", nargs="*", help="files, or folders of them: images, videos, sounds (wav)")
    parser.add_argument("--samples", help="JSONL file with image, prompt, ground_truth: such as a run's samples.jsonl")
    add_scorers(parser, "--set")
    parser.add_argument("--external-lib", help="module, or file x.py, that registers rewards of your own")
    parser.add_argument("--prompt", help="one prompt for all images")
    parser.add_argument("--prompts", help="text file with a line for each image")
    parser.add_argument("--ground-truth", help="one ground truth for all images")
    parser.add_argument("--ground-truths", help="text file with a line for each image")
    parser.add_argument("--batch-size", type=at_least(1), default=8, help="images in one call (%(default)s)")
    parser.add_argument("--out", default="scores.html", help="the page (%(default)s)")
    parser.add_argument("--json", help="write a line for each image to this file")
    parser.add_argument("--pairs", help="write preference pairs by the first scorer to this JSONL file")
    return parser


def _run(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from verl_omni.report.contact_sheet import Shot, Tile, write_contact_sheet
    from verl_omni.rewards.by_hand import preference_pairs
    from verl_omni.utils.external_lib import import_external_lib

    import_external_lib(options.external_lib, "--external-lib")
    rewards = read_rewards(options, "--set")
    samples, labels = _samples(options), rewards.labels
    rewards.check(samples, "give it with --prompt(s) and --ground-truth(s), or all of it with --samples")
    with tqdm(total=len(samples) * (len(rewards.choices) + len(rewards.own)), unit="file") as bar:
        rewards.score(samples, options.batch_size, bar)
    order = sorted(samples, key=lambda s: (s.score(labels[0]) is None, -(s.score(labels[0]) or 0.0)))
    print(table(order, labels))
    tiles = [Tile(s.prompt, [Shot(s.file, s.file.name, shown(s, labels))], s.ground_truth) for s in order]
    facts = f"{len(tiles)} files, the best first"
    print(f"Page: {write_contact_sheet(Path(options.out), ', '.join(labels), facts, tiles)}")
    if options.json:
        _write_lines(options.json, [_line(sample) for sample in samples])
    if options.pairs:
        if other := next((s.file for s in samples if s.file.suffix.lower() in (".wav", ".mp4", ".txt")), None):
            raise ValueError(f"--pairs: {other} is no image, and `prepare-pairs` takes pairs of images")
        pairs = preference_pairs(samples, labels[0])
        if not pairs:
            raise ValueError("no prompt has two images with different scores: there is no pair to write")
        _write_lines(options.pairs, pairs)
        print(f"Pairs: {len(pairs)} in {options.pairs}; next, with the folder of the model to train as MODEL:")
        print(f"    verl-omni prepare-pairs MODEL {options.pairs} {Path(options.pairs).stem}_cache {_size(samples)}")
    failed = sum(sample.score(label) is None for sample in samples for label in labels)
    if failed:
        print(f"{failed} of {len(samples) * len(labels)} scores failed", file=sys.stderr)
    return int(failed > 0)


def _size(samples: "list[Sample]") -> str:
    """As `prepare-pairs` is to be told it."""
    from verl_omni.utils.image_files import frames_in

    sizes = [next(frames_in(sample.file)).size for sample in samples]
    (width, height), others = sizes[0], set(sizes[1:])
    return f"--height {height} --width {width}" + (" --resize" if others - {sizes[0]} else "")


def shown(sample: "Sample", labels: list[str]) -> dict[str, Any]:
    """Its answers as a page has them: why there is none is a text."""
    from verl_omni.rewards.reward_function import RewardError

    answers = {label: sample.answers[label] for label in labels}
    return {label: str(a) if isinstance(a, RewardError) else a for label, a in answers.items()}


def _samples(options: argparse.Namespace) -> "list[Sample]":
    from verl_omni.rewards.by_hand import Sample, find_images, read_samples

    if bool(options.images) == bool(options.samples):
        raise ValueError("say which images: files or folders, or --samples FILE.jsonl")
    samples = read_samples(options.samples) if options.samples else [Sample(i) for i in find_images(options.images)]
    for one, file, name in (
        (options.prompt, options.prompts, "prompt"),
        (options.ground_truth, options.ground_truths, "ground_truth"),
    ):
        lines = [one] * len(samples) if file is None else Path(file).read_text(encoding="utf-8").splitlines()
        if len(lines) != len(samples):
            raise ValueError(f"{file} has {len(lines)} lines for {len(samples)} files: expected one for each")
        for sample, line in zip(samples, lines, strict=True):
            if line is not None:
                setattr(sample, name, line)
    return samples


def table(samples: "list[Sample]", labels: list[str]) -> str:
    """Scores by file, the best first, and each reward's mean."""
    width = max(5, *(min(len(s.file.name), 40) for s in samples[:SHOWN]))
    lines = [f"{'file':<{width}}  " + "  ".join(f"{label:>14}" for label in labels)]
    for sample in samples[:SHOWN]:
        scores = ("failed" if sample.score(label) is None else f"{sample.score(label):.4f}" for label in labels)
        lines.append(f"{sample.file.name[:width]:<{width}}  " + "  ".join(f"{score:>14}" for score in scores))
    if len(samples) > SHOWN:
        lines.append(f"... {len(samples) - SHOWN} more")
    known = {label: [x for s in samples if (x := s.score(label)) is not None] for label in labels}
    means = (f"{mean(values):.4f}" if values else "-" for values in known.values())
    lines.append(f"{'mean':<{width}}  " + "  ".join(f"{value:>14}" for value in means))
    for label in labels:
        why = next((str(s.answers[label]) for s in samples if s.score(label) is None), None)
        if why:
            lines.append(f"{label} failed first with: {why}")
    return "\n".join(lines)


def _line(sample: "Sample") -> dict:
    from verl_omni.rewards.reward_function import RewardError

    answers = {k: {"failed": str(a)} if isinstance(a, RewardError) else a for k, a in sample.answers.items()}
    return {"image": str(sample.file), "prompt": sample.prompt, "ground_truth": sample.ground_truth, **answers}


def _write_lines(path: str, rows: list[dict]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
