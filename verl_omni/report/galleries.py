"""Samples in the report: of validation, before and after, and of training, what the reward prefers."""

import sys
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl_omni.report.pictures import movie_player, picture_or_player, sound_player, text_in
from verl_omni.utils.json_files import read_lines
from verl_omni.utils.readable import readable
from verl_omni.utils.suggest import unknown

MAX_PAIRS = 36
OPEN_PAIRS = 9  # three rows on a wide screen: curves come below them


def before_and_after(validations: Sequence[tuple[int, Path]]) -> str:
    """The same prompts and seeds at the first and at the last validation, in the order of the file."""
    if not validations:
        return ""
    kept = [
        (step, folder, {s["index"]: s for s in read_samples(folder) if s["score"] is not None})  # None: it failed
        for step, folder in validations
    ]
    shown = [kept[0], kept[-1]] if len(kept) > 1 else kept
    common = [index for index in shown[-1][2] if index in shown[0][2]][:MAX_PAIRS]
    scores = [float(samples[index]["score"]) for _, _, samples in shown for index in common]
    tiles = []
    for index in common:
        shots = (_shot(samples[index], folder, step, scores) for step, folder, samples in shown)
        prompt = escape(str(shown[-1][2][index]["prompt"]))
        tiles.append(f'<div class="pair"><div class="prompt">{prompt}</div>{"".join(shots)}</div>')
    steps = " (left) and ".join(str(step) for step, _, _ in shown) + (" (right)" if len(shown) > 1 else "")
    note = f"The first {len(tiles)} validation prompts, with the same seeds, at step {steps}."
    if tiles:
        ends = [readable(end(scores)) for end in (min, max)]
        note += f" Colours go from the lowest score here ({ends[0]}) to the highest ({ends[1]})."
    heading = "Before and after" if len(shown) > 1 else "Validation"
    more = ""
    if rest := tiles[OPEN_PAIRS:]:
        more = f'<details class="rest"><summary>{len(rest)} more</summary>{_pairs(rest)}</details>'
    return section(heading, f'<p class="note">{note}</p>{_pairs(tiles[:OPEN_PAIRS])}{more}')


def best_and_worst(run_dir: Path) -> str:
    """The best and the worst image of each prompt that were kept of the last training step which kept any."""
    folders = {int(p.name.removeprefix("step_")): p for p in (run_dir / "training").glob("step_*")}
    folders = {step: p for step, p in folders.items() if (p / "samples.jsonl").is_file()}
    if not folders:
        return ""
    step = max(folders)
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for sample in read_samples(folders[step]):
        group, _, side = Path(file_of(sample)).stem.rpartition("_")
        groups.setdefault(group, {})[side] = sample
    whole = {group: sides for group, sides in sorted(groups.items()) if {"best", "worst"} <= sides.keys()}
    scores = [float(sample["score"]) for sides in whole.values() for sample in sides.values()]
    tiles = [
        f'<div class="pair"><div class="prompt">{escape(str(sides["best"]["prompt"]))}</div>'
        f"{''.join(_shot(sides[side], folders[step], step, scores) for side in ('best', 'worst'))}</div>"
        for sides in whole.values()
    ]
    note = f"The best (left) and the worst of one prompt, by the reward, in training step {step}."
    shown = f'<p class="note">{note}</p>{_pairs(tiles)}' if tiles else ""
    return section("What the reward prefers", shown)


def _pairs(tiles: Sequence[str]) -> str:
    return f'<div class="pairs">{"".join(tiles)}</div>'


def section(heading: str, body: str) -> str:
    return f"<section><h2>{heading}</h2>{body}</section>" if body else ""


def _shot(sample: dict[str, Any], folder: Path, step: int, scores: Sequence[float]) -> str:
    """A sample with its score, what a rewriter wrote and what else the reward told, such as what the OCR read."""
    written = {"written": sample["written"]} if "written" in sample else {}
    told = (
        f"<span>{escape(key.replace('_', ' '))}: <b>{escape(_short(value))}</b></span>"
        for key, value in {**written, **sample.get("reward_extra_info", {})}.items()
    )
    low, high = min(scores), max(scores)
    good = (float(sample["score"]) - low) / (high - low) if high > low else 0.5
    score = f'<i class="score" style="--good:{good:.2f}">{readable(sample["score"], 2)}</i>'
    return f'<div class="shot">{_shown(sample, folder, step)}<span>{score}</span>{"".join(told)}</div>'


#: how a file of each kind is shown (`verl_omni.utils.responses.KINDS`)
SHOWN: dict[str, Callable[[Path, str], str]] = {
    "image": picture_or_player,
    "video": picture_or_player,
    "sound": sound_player,
    "video with sound": movie_player,
    "text": lambda path, alt: f"<blockquote>{escape(text_in(path))}</blockquote>",
}


def file_of(sample: dict[str, Any]) -> str:
    """The name of its file, as a line of samples.jsonl has it."""
    return sample["image"] if "image" in sample else sample["file"]


def _shown(sample: dict[str, Any], folder: Path, step: int) -> str:
    """A file that lies beside its samples.jsonl. A page is passed on: it must not take others along."""
    try:
        name, kind = file_of(sample), sample.get("kind", "image")
        path = (folder / name).resolve()
        if not path.is_relative_to(folder.resolve()):
            raise ValueError(f"{name[:100]} lies outside {folder}, and only images of the run are shown")
        if kind not in SHOWN:
            raise ValueError(unknown("kind of sample", str(kind)[:40], SHOWN))
        return SHOWN[kind](path, f"step {step}")
    except (OSError, ValueError, RuntimeError) as error:  # the last for a loop of links
        print(f"{folder / 'samples.jsonl'}: {error}", file=sys.stderr)
        return f'<span class="down">{escape(str(error))}</span>'


def read_samples(folder: Path) -> Iterable[dict[str, Any]]:
    """The rows of samples.jsonl, or one line for one that a run does not write."""
    rows = []
    for where, row in read_lines(folder / "samples.jsonl"):
        file = "file" if row.get("kind", "video") != "video" else "image"
        kinds = {"index": int, file: str, "score": float | int | None, "reward_extra_info": dict}
        for key, kind in kinds.items():
            if not isinstance(row.get(key, {} if kind is dict else None), kind):
                raise ValueError(f'{where}: "{key}" is {row.get(key)!r:.60}, which no run writes')
        rows.append(row)
    return rows


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    text = str(value)
    return "(nothing)" if not text else text if len(text) <= 60 else text[:57] + "..."
