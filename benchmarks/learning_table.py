"""The table and the figure of `benchmarks.learning`, from the curves that its runs have left.

Seconds are those of a run that has the card to itself.
"""

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

Curve = dict[str, Any]
YARDSTICK = "flow_grpo"
SO_FAR = "so_far.json"  # in the folder of a run that goes on or was killed
LEVELS = tuple(level / 100 for level in range(40, 100, 5))
SEEDS, SEEDS_OF_BEST = 2, 3
FEW = 10  # steps, after which little can be said
LONG = 0.6  # of the longest run's seconds: what is shorter was cut short
INKS = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#a6761d")  # of the best, so many
YARDSTICK_INK, OTHERS_INK = "#000000", "#c8c8c8"
# What the authors of each say of their own, on large models and tasks of their own choice.
CLAIMS = {
    "mix_grpo": "half of DanceGRPO's time",
    "diffusion_nft": "up to 25 × flow_grpo",
    "awm": "up to 24 × flow_grpo",
    "dgpo": "near 30 × flow_grpo",
}
CLAIMS_OF_TASK = {
    "scenes": CLAIMS | {"flow_grpo": "GenEval .63 → .95"},
    "words": CLAIMS | {"flow_grpo": "OCR .59 → .92", "dgpo": "OCR .96, near 30 × flow_grpo"},
}
CLAIMS_OF_TASK["signs"] = CLAIMS_OF_TASK["words"]


def read_curves(folder: Path, task: str) -> dict[str, list[Curve]]:
    """Of a task, by algorithm, the runs with the learning rate that ended highest among those tried.

    What a run has left that was killed counts as well. Among the runs of an algorithm those that were cut short do not,
    where one was not: all would be seen only as far as the shortest.
    """
    chosen = {name: max(rates.values(), key=mean_ending) for name, rates in read_all(folder, task).items()}
    return {
        name: [run for run in runs if length(run) >= LONG * max(map(length, runs))] for name, runs in chosen.items()
    }


def read_all(folder: Path, task: str) -> dict[str, dict[float, list[Curve]]]:
    """By algorithm and learning rate, all runs of a task."""
    whole = sorted(folder.glob("*.json"))
    names = {file.stem for file in whole}
    parts = [file for file in sorted(folder.glob(f"runs/*/{SO_FAR}")) if file.parent.name not in names]
    tried: dict[str, dict[float, list[Curve]]] = {}
    for curve in (json.loads(file.read_text()) for file in [*whole, *parts]):
        if length(curve) > 0 and curve["task"] == task:
            tried.setdefault(curve["algorithm"], {}).setdefault(curve["lr"], []).append(curve)
    starts = {curve["points"][0]["score"] for rates in tried.values() for runs in rates.values() for curve in runs}
    if len(starts) > 1:
        raise ValueError(
            f"runs of {task} in {folder} began at {', '.join(map(shown, sorted(starts)))}: each generator that is made "
            "is another one, and runs are compared from one start; give those of another one a folder of their own"
        )
    return tried


def search(tried: dict[str, dict[float, list[Curve]]]) -> str:
    """A line for each algorithm: where its runs end with each learning rate, the same for all."""
    rates = sorted({rate for of_one in tried.values() for rate in of_one})
    lines = [f"| algorithm | {' | '.join(f'{rate:g}' for rate in rates)} |", "|---" * (len(rates) + 1) + "|"]
    for name, runs in sorted(tried.items(), key=lambda one: -max(map(mean_ending, one[1].values()))):
        ends = (shown(mean_ending(runs[rate])) if rate in runs else "" for rate in rates)
        lines.append(f"| `{name}` | {' | '.join(ends)} |")
    return "\n".join(lines)


def best(curves: dict[str, list[Curve]]) -> list[str]:
    """The algorithms, the one that ends highest first."""
    return sorted(curves, key=lambda name: -mean_ending(curves[name]))


def length(curve: Curve) -> float:
    """Seconds of training."""
    return curve["points"][-1]["seconds"]


def ending(curve: Curve) -> float:
    """The mean of the last two validations: one alone swings. What was not trained yet is none of them."""
    return fmean(point["score"] for point in curve["points"][1:][-2:])


def mean_ending(runs: list[Curve]) -> float:
    return fmean(map(ending, runs))


def at(curve: Curve, axis: str, place: float, what: str = "score") -> float | None:
    """What is on the curve there, between the two nearest points; None beyond its end."""
    points = curve["points"]
    for before, after in zip(points, points[1:], strict=False):
        if before[axis] <= place <= after[axis]:
            share = (place - before[axis]) / max(after[axis] - before[axis], 1e-9)
            return before[what] + share * (after[what] - before[what])
    return None


def mean_at(runs: list[Curve], axis: str, place: float) -> float | None:
    scores = [at(run, axis, place) for run in runs]
    return None if None in scores else fmean(scores)


def time_to(runs: list[Curve], level: float, axis: str = "seconds") -> float | None:
    """Where the mean of the runs is that high for the first time."""
    last = min(run["points"][-1][axis] for run in runs)
    for i in range(401):
        if (mean_at(runs, axis, last * i / 400) or 0) >= level:
            return last * i / 400
    return None


def report(curves: dict[str, list[Curve]], algorithms: list[str]) -> str:
    """The table, what it stands on, and what of it is missing: a later call of `benchmarks.learning` adds it."""
    if not curves:
        return "No run has left a curve yet."
    runs = [run for of_one in curves.values() for run in of_one]
    devices, settings = {run["device"] for run in runs}, {" ".join(run["settings"]) for run in runs} - {""}
    lines = [table(curves), "", f"{len(runs)} runs on {', '.join(sorted(devices))}; seconds as if each had it alone."]
    if settings:
        lines.append(f"Overrides of the recipe: {'; '.join(f'`{given}`' for given in sorted(settings))}.")
    if missing := [f"{count} of `{name}`" for name, count in wanting(curves, algorithms).items()]:
        lines.append(f"Runs that are still missing: {', '.join(missing)}.")
    if cut := [f"`{name}`" for name, of_one in curves.items() if not all(run["whole"] for run in of_one)]:
        lines.append(f"Ended before the {runs[0]['asked']:.0f} s that were asked for: {', '.join(cut)}.")
    made = {name: min(run["points"][-1]["step"] for run in of_one) for name, of_one in curves.items()}
    if few := [f"`{name}` ({steps})" for name, steps in made.items() if steps < FEW]:
        lines.append(f"Of so few steps that little can be said: {', '.join(few)}.")
    return "\n".join(lines)


def wanting(curves: dict[str, list[Curve]], algorithms: list[str]) -> dict[str, int]:
    """How many seeds of an algorithm are not there yet: all are to have SEEDS, the best of them SEEDS_OF_BEST."""
    asked = dict.fromkeys(algorithms, SEEDS) | dict.fromkeys(best(curves)[: len(INKS)], SEEDS_OF_BEST)
    lacks = {name: count - len(curves.get(name, [])) for name, count in asked.items()}
    return {name: count for name, count in lacks.items() if count > 0}


def table(curves: dict[str, list[Curve]]) -> str:
    """A line for each algorithm, the best first. Where the yardstick is not there, the best one is."""
    order = best(curves)
    own = curves.get(YARDSTICK) or curves[order[0]]
    images = min(run["points"][-1]["images"] for runs in curves.values() for run in runs)
    seconds = min(length(run) for runs in curves.values() for run in runs)
    start = fmean(run["points"][0]["score"] for run in own)
    levels = [level for level in LEVELS if level > start and time_to(own, level) is not None][-2:]
    heads = ["algorithm", "lr", "seeds", "ms an image", "start", "end (lowest to highest)", f"after {images} images"]
    heads += [f"after {seconds:.0f} s", *(f"time to {level:g}" for level in levels)]
    heads += [*(f"images to {level:g}" for level in levels[-1:]), "second reward", "diversity", "its authors' claim"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in order:
        runs = curves[name]
        ends = sorted(ending(run) for run in runs)
        spread = f" ({shown(ends[0])} to {shown(ends[-1])})" if len(ends) > 1 else ""
        each = fmean(1000 * length(run) / run["points"][-1]["images"] for run in runs)
        start = fmean(run["points"][0]["score"] for run in runs)
        cells = [f"`{name}`", f"{runs[0]['lr']:g}", f"{len(runs)}", f"{each:.1f}", shown(start)]
        cells += [f"{shown(fmean(ends))}{spread}"]
        cells += [shown(mean_at(runs, "images", images)), shown(mean_at(runs, "seconds", seconds))]
        cells += [relative(time_to(own, level), time_to(runs, level), " s") for level in levels]
        cells += [relative(*(time_to(of, level, "images") for of in (own, runs))) for level in levels[-1:]]
        for what in ("second", "diversity"):
            first, last = (fmean(run["points"][i][what] for run in runs) for i in (0, -1))
            cells.append(f"{shown(first)} → {shown(last)}")
        claims = CLAIMS_OF_TASK[runs[0]["task"]]
        lines.append(f"| {' | '.join([*cells, claims.get(name, '')])} |")
    return "\n".join(lines)


def write_into(document: Path, told: str, task: str) -> None:
    """Where it says <!-- LEARNING scenes -->, or another task."""
    from verl_omni.report.document_tables import fill

    document.write_text(fill(document.read_text(), f"LEARNING {task}", told))


def shown(score: float | None) -> str:
    return "" if score is None else f"{score:.3f}".removeprefix("0")


def relative(own: float | None, others: float | None, unit: str = "") -> str:
    """So many seconds or images, and how many times as fast as the yardstick."""
    if others is None:
        return "not reached"
    return f"{others:.0f}{unit} ({own / others:.2g} ×)" if own and others else f"{others:.0f}{unit}"


def figure(curves: dict[str, list[Curve]], width: int = 900, height: int = 460) -> str:
    """An SVG: the mean score of each algorithm against seconds of training; the best, and the yardstick, stand out."""
    left, right, top, bottom = 50, 230, 30, 45
    ends = {name: min(map(length, runs)) for name, runs in curves.items()}
    scores = [point["score"] for runs in curves.values() for run in runs for point in run["points"]]
    low, high, last = min(scores) - 0.02, min(1.0, max(scores) + 0.02), max(ends.values())

    def place(seconds: float, score: float) -> str:
        x = left + seconds / last * (width - left - right)
        return f"{x:.1f},{top + (high - score) / (high - low) * (height - top - bottom):.1f}"

    parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for i in range(5):
        score, seconds = low + (high - low) * i / 4, last * i / 4
        x, y = place(seconds, score).split(",")
        parts.append(f'<path d="M{left},{y}H{width - right}" stroke="#ddd"/>')
        parts.append(_text(left - 6, float(y) + 4, f"{score:.2f}", "end"))
        parts.append(_text(float(x), height - bottom + 18, f"{seconds:.3g}", "middle"))
    parts.append(_text((left + width - right) / 2, height - 8, "seconds of training with the card to itself", "middle"))
    parts.append(_text(left - 36, 16, "score on prompts that were never trained on", "start"))
    for number, name in reversed(list(enumerate(best(curves)))):  # the best on top
        runs, ink = curves[name], INKS[number] if number < len(INKS) else OTHERS_INK
        ink = YARDSTICK_INK if name == YARDSTICK else ink
        grid = [min(ends[name] * i / 60, ends[name]) for i in range(61)]  # rounding may lead beyond the end
        line = " ".join(place(s, mean_at(runs, "seconds", s)) for s in grid)
        style = f'fill="none" stroke="{ink}" stroke-width="{1.2 if ink == OTHERS_INK else 2.2}"'
        parts.append(f'<polyline points="{line}" {style}/>')
        y = top + 12 + 20 * number
        parts.append(f'<path d="M{width - right + 12},{y - 4}h24" {style}/>')
        parts.append(_text(width - right + 42, y, f"{name} {shown(mean_ending(runs))}", "start"))
    return _svg(parts, width, height)


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(parts: Iterable[str], width: int, height: int) -> str:
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" {style}>'
    return "\n".join([opening, *parts, "</svg>"]) + "\n"
