"""Scored images on one page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from verl_omni.report.assets import asset
from verl_omni.report.galleries import SHOWN
from verl_omni.utils.readable import readable

KIND = {".wav": "sound", ".txt": "text"}  # all others are pictures, or move


@dataclass(frozen=True)
class Shot:
    """A file, what it is called, and what each reward answered, or why it did not."""

    file: Path
    name: str
    answers: Mapping[str, Mapping[str, Any] | str]


@dataclass(frozen=True)
class Tile:
    """A prompt, what its images are compared with, and one of them or several side by side."""

    prompt: str
    shots: Sequence[Shot]
    ground_truth: Any = field(default=None)


def write_contact_sheet(out: Path, title: str, facts: str, tiles: Sequence[Tile]) -> Path:
    """`facts` is the line below the title."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{asset('style.css')}</style></head><body><main><header><h1>{escape(title)}</h1>"
        f'<p class="facts">{escape(facts)}</p></header>'
        f'<div class="pairs">{"".join(map(_tile, tiles))}</div></main></body></html>',
        encoding="utf-8",
    )
    return out


def _tile(tile: Tile) -> str:
    truth = "" if tile.ground_truth in (None, "") else f" <b>{escape(str(tile.ground_truth))}</b>"
    shots = "".join(
        f'<div class="shot">{_shown(shot.file, escape(shot.name))}<span>{escape(shot.name)}</span>'
        f"{''.join(_answer(name, answer) for name, answer in shot.answers.items())}</div>"
        for shot in tile.shots
    )
    return f'<div class="pair"><div class="prompt">{escape(tile.prompt)}{truth}</div>{shots}</div>'


def _shown(file: Path, name: str) -> str:
    """No picture for a file that is none: what is wrong with it is said beside it."""
    try:
        return SHOWN[KIND.get(file.suffix.lower(), "image")](file, name)
    except ValueError:
        return f'<img alt="{name}" src="">'


def _answer(name: str, answer: Mapping[str, Any] | str) -> str:
    if isinstance(answer, str):
        return f'<span class="down">{escape(name)}: {escape(answer)}</span>'
    told = "".join(
        f"<span>{escape(key)}: {escape(value if isinstance(value, str) else readable(value))}</span>"
        for key, value in answer.items()
        if key != "score" and isinstance(value, int | float | str)
    )
    return f"<span>{escape(name)}: <b>{readable(answer['score'])}</b></span>{told}"
