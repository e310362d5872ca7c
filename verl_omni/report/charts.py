"""What a page draws, as plain data: `web/charts.js` makes curves, stacked bars and lanes of time of it, with uPlot."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

MOST_POINTS = 2000  # of a curve: a page shows no more, and stays light
Chart = dict[str, Any]


@dataclass(frozen=True)
class Series:
    """A named curve. ``markers`` draws a dot at every point, for curves that have few."""

    label: str
    points: Sequence[tuple[float, float]]
    markers: bool = False


def line_chart(heading: str, series: Sequence[Series], percent: bool = False, wide: bool = False) -> Chart:
    """Curves over training steps."""
    shown = [
        {"label": one.label, "points": [[x, _short(y)] for x, y in thinned(one.points)], "markers": one.markers}
        for one in series
        if one.points
    ]
    return {"kind": "lines", "heading": heading, "series": shown, "percent": percent, "wide": wide}


def stacked_bars(heading: str, xs: Sequence[float], parts: Mapping[str, Sequence[float]], unit: str = "s") -> Chart:
    """One bar for each step, made of the named parts from bottom to top. Of very many steps the last ones."""
    shown = [
        {"label": label, "points": [[x, _short(y)] for x, y in zip(xs, values, strict=True)][-MOST_POINTS:]}
        for label, values in parts.items()
    ]
    return {"kind": "bars", "heading": heading, "series": shown, "wide": True, "unit": unit}


def lanes(heading: str, rows: Mapping[str, Sequence[tuple[str, float, float]]]) -> Chart:
    """Who did what from when to when, in seconds: a row for each."""
    shown = [
        {"who": who, "spans": [[what, round(start, 3), round(end, 3)] for what, start, end in spans]}
        for who, spans in rows.items()
    ]
    return {"kind": "lanes", "heading": heading, "rows": shown, "wide": True}


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Of each stretch of a long curve its lowest and its highest point, so that no spike is lost; and its end."""
    if len(points) <= most:
        return list(points)
    stretch, kept = -(-len(points) // (most // 2 - 1)), []
    for start in range(0, len(points), stretch):
        part = range(start, min(start + stretch, len(points)))
        kept += sorted({min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])})
    return [points[i] for i in sorted({*kept, len(points) - 1})]


def as_figures(charts: Sequence[Chart], first: int = 0) -> str:
    """Places in a page; the page's `figures_data` says what is drawn in them."""
    figures = (
        f'<figure data-chart="{number}"{" class=wide" if chart["wide"] else ""}>'
        f"<figcaption>{escape(chart['heading'])}</figcaption></figure>"
        for number, chart in enumerate(charts, start=first)
    )
    return f'<div class="charts">{"".join(figures)}</div>' if charts else ""


def as_script(charts: Sequence[Chart]) -> str:
    """The data as a page holds it: no text in it can end the script."""
    data = json.dumps(charts).replace("<", "\\u003c")
    return f'<script type="application/json" id="chart-data">{data}</script>'


def _short(value: float) -> float:
    """As many digits as anyone can see."""
    return float(f"{value:.6g}")
