"""Try a reward on images that you have, before a run spends days on it.

    verl-omni score --scorer ocr images/*.png --ground-truth "OPEN"
    verl-omni score --scorer ocr --samples outputs/run/validation/step_50/samples.jsonl
    verl-omni score --scorer pickscore --set pickscore.model=/models/pickscore images/ --prompts prompts.txt
    verl-omni score --function my_reward.py:compute_score images/ --prompt "a red cube"

Prints a table and writes a page with the images, the best first. With --pairs it also writes the best and the worst
image of each prompt, as rows for `verl-omni prepare-pairs`.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_omni.rewards.by_hand import Sample
    from verl_omni.rewards.reward_function import RewardFunction

SHOWN = 40  # rows of the table; the page has all


def main() -> None:
    options = _parser().parse_args()
    try:
        sys.exit(_run(options))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "verl-omni score", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", nargs="*", help="image files, or folders of them")
    parser.add_argument("--samples", help="JSONL file with image, prompt, ground_truth: such as a run's samples.jsonl")
    parser.add_argument("--scorer", action="append", default=[], help="a registered reward; may be given several times")
    parser.add_argument("--function", help="a function of your own, FILE.py:NAME")
    parser.add_argument("--set", action="append", default=[], metavar="SCORER.SETTING=VALUE", help="its settings")
    parser.add_argument("--external-lib", help="module that registers rewards of your own")
    parser.add_argument("--prompt", help="one prompt for all images")
    parser.add_argument("--prompts", help="text file with a line for each image")
    parser.add_argument("--ground-truth", help="one ground truth for all images")
    parser.add_argument("--ground-truths", help="text file with a line for each image")
    parser.add_argument("--batch-size", type=int, default=8, help="images in one call (%(default)s)")
    parser.add_argument("--out", default="scores.html", help="the page (%(default)s)")
    parser.add_argument("--json", help="write a line for each image to this file")
    parser.add_argument("--pairs", help="write preference pairs by the first scorer to this JSONL file")
    return parser


def _run(options: argparse.Namespace) -> int:
    from tqdm import tqdm

    from verl_omni.rewards.by_hand import preference_pairs, score
    from verl_omni.rewards.reward_function import RewardError
    from verl_omni.utils.external_lib import import_external_lib

    import_external_lib(options.external_lib)
    functions = _functions(options)
    samples = _samples(options)
    with tqdm(total=len(samples) * len(functions), unit="image") as bar:
        score(samples, functions, options.batch_size, bar)
    first = next(iter(functions))
    order = sorted(samples, key=lambda s: (s.score(first) is None, -(s.score(first) or 0.0)))
    print(table(order, list(functions)))
    from verl_omni.report.contact_sheet import write_contact_sheet

    rows = [
        (s.image, s.prompt, {k: str(a) if isinstance(a, RewardError) else a for k, a in s.answers.items()})
        for s in order
    ]
    print(f"Page: {write_contact_sheet(Path(options.out), ', '.join(functions), rows)}")
    if options.json:
        _write_lines(options.json, [_line(sample) for sample in samples])
    if options.pairs:
        pairs = preference_pairs(samples, first)
        if not pairs:
            raise ValueError("no prompt has two images with different scores: there is no pair to write")
        _write_lines(options.pairs, pairs)
        print(f"Pairs: {len(pairs)} in {options.pairs}; next: verl-omni prepare-pairs MODEL {options.pairs} OUT")
    failed = sum(sample.score(label) is None for sample in samples for label in functions)
    if failed:
        print(f"{failed} of {len(samples) * len(functions)} scores failed", file=sys.stderr)
    return int(failed > 0)


def _functions(options: argparse.Namespace) -> "dict[str, RewardFunction]":
    import yaml

    from verl_omni.rewards import check_package, check_settings
    from verl_omni.rewards.by_hand import as_functions
    from verl_omni.rewards.choice import read_choices
    from verl_omni.rewards.reward_function import RewardFunction

    entries: dict[str, dict] = {name: {"weight": 1.0} for name in options.scorer}
    for given in options.set:
        key, equals, value = given.partition("=")
        label, dot, setting = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"--set {given}: expected SCORER.SETTING=VALUE, such as --set ocr.num_threads=2")
        if label not in entries:
            raise ValueError(f"--set {given}: there is no --scorer {label}")
        entries[label][setting] = yaml.safe_load(value)
    choices = read_choices(entries)
    for label, choice in choices.items():
        if choice.processes:
            raise ValueError(f"--set {label}.processes={choice.processes}: this command scores in its own process")
        check_settings(choice.name, choice.settings, label)
        check_package(choice.name)
    functions = as_functions(choices)
    if options.function:
        path, colon, name = options.function.rpartition(":")
        if not colon:
            path, name = options.function, "compute_score"
        functions[name] = RewardFunction.load(path, name)
    if not functions:
        raise ValueError("say which reward: --scorer NAME, or --function FILE.py:NAME")
    return functions


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
            raise ValueError(f"{file} has {len(lines)} lines for {len(samples)} images: expected one for each")
        for sample, line in zip(samples, lines, strict=True):
            if line is not None:
                setattr(sample, name, line)
    return samples


def table(samples: "list[Sample]", labels: list[str]) -> str:
    """Scores by image, the best first, and each reward's mean."""
    width = max(5, *(min(len(s.image.name), 40) for s in samples[:SHOWN]))
    lines = [f"{'image':<{width}}  " + "  ".join(f"{label:>14}" for label in labels)]
    for sample in samples[:SHOWN]:
        scores = ("failed" if sample.score(label) is None else f"{sample.score(label):.4f}" for label in labels)
        lines.append(f"{sample.image.name[:width]:<{width}}  " + "  ".join(f"{score:>14}" for score in scores))
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
    return {"image": str(sample.image), "prompt": sample.prompt, "ground_truth": sample.ground_truth, **answers}


def _write_lines(path: str, rows: list[dict]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
