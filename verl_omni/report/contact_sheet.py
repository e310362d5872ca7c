"""Scored images on one page, the best first."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from verl_omni.report.pictures import data_uri
from verl_omni.report.style import STYLE
from verl_omni.report.tracking import readable


def write_contact_sheet(
    out: Path, title: str, rows: Sequence[tuple[Path, str, Mapping[str, Mapping[str, Any] | str]]]
) -> Path:
    """`rows` are (image, prompt, reward -> its answer, or why it has none), in the order of the page."""
    tiles = []
    for image, prompt, answers in rows:
        said = "".join(_answer(name, answer) for name, answer in answers.items())
        tiles.append(
            f'<div class="pair"><div class="prompt">{escape(prompt)}</div><div class="shot">'
            f'<img alt="{escape(image.name)}" src="{_source(image)}"><span>{escape(image.name)}</span>{said}'
            "</div></div>"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style></head><body><main><header><h1>{escape(title)}</h1>"
        f'<p class="facts">{len(tiles)} images, the best first</p></header>'
        f'<div class="pairs">{"".join(tiles)}</div></main></body></html>',
        encoding="utf-8",
    )
    return out


def _source(image: Path) -> str:
    """Nothing for a file that is no image: what is wrong with it is said beside it."""
    try:
        return data_uri(image)
    except (OSError, ValueError):
        return ""


def _answer(name: str, answer: Mapping[str, Any] | str) -> str:
    if isinstance(answer, str):
        return f'<span class="down">{escape(name)}: {escape(answer)}</span>'
    told = "".join(
        f"<span>{escape(key)}: {escape(value if isinstance(value, str) else readable(value))}</span>"
        for key, value in answer.items()
        if key != "score" and isinstance(value, int | float | str)
    )
    return f"<span>{escape(name)}: <b>{readable(answer['score'])}</b></span>{told}"
