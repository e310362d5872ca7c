"""Charts as inline SVG: a line chart, stacked bars and lanes of time, drawn with the colours that the page defines.

Colours are the CSS variables --c0, --c1, ... of the page, so that a chart follows its light or dark theme.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

HEIGHT = 220
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 14, 38
LANE = 26
COLOURS = 8


@dataclass(frozen=True)
class Series:
    """A named curve. ``markers`` draws a dot at every point, for curves that have few."""

    label: str
    points: Sequence[tuple[float, float]]
    markers: bool = False


def line_chart(series: Sequence[Series], width: int = 480, x_label: str = "step", percent: bool = False) -> str:
    """Curves over a common axis; the exact values show when the pointer rests on a point."""
    series = [one for one in series if one.points]
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    marks = ticks(0, max(ys) or 1) if percent else ticks(min(ys), max(ys))
    plot = _Plot(width, min(xs), max(xs), marks)
    shapes = []
    for index, one in enumerate(series):
        colour = f"var(--c{index % COLOURS})"
        places = [(plot.x(x), plot.y(y)) for x, y in one.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (step, value) in zip(places, one.points, strict=True):
            tip = f"<title>{escape(one.label)}, {x_label} {step:g}: {value:.4g}</title>"
            dot = f'fill="{colour}"' if one.markers or len(places) == 1 else 'fill="transparent"'
            shapes.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {dot}>{tip}</circle>')
    return plot.svg(shapes, x_label, percent) + legend([one.label for one in series])


def stacked_bars(
    xs: Sequence[float], parts: Mapping[str, Sequence[float]], width: int = 480, x_label: str = "step", unit: str = "s"
) -> str:
    """One bar for each x, made of the named parts from bottom to top."""
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    plot = _Plot(width, min(xs) - 0.5, max(xs) + 0.5, ticks(0, max(totals)))
    bar = max(0.7 * abs(plot.x(1) - plot.x(0)), 1.0)
    shapes, bottoms = [], [0.0] * len(xs)
    for index, (label, values) in enumerate(parts.items()):
        for i, (x, value) in enumerate(zip(xs, values, strict=True)):
            top = bottoms[i] + value
            place = f'x="{plot.x(x) - bar / 2:.1f}" y="{plot.y(top):.1f}" width="{bar:.1f}"'
            height = plot.y(bottoms[i]) - plot.y(top)
            tip = f"<title>{escape(label)}, {x_label} {x:g}: {value:.3g} {unit}</title>"
            shapes.append(f'<rect {place} height="{height:.1f}" fill="var(--c{index % COLOURS})">{tip}</rect>')
            bottoms[i] = top
    return plot.svg(shapes, x_label) + legend(list(parts))


def lanes(rows: Mapping[str, Sequence[tuple[str, float, float]]], width: int = 480) -> str:
    """Who did what from when to when, in seconds: a row for each, a colour for what was done."""
    kinds = list(dict.fromkeys(what for spans in rows.values() for what, _, _ in spans))
    last = max(end for spans in rows.values() for _, _, end in spans)
    plot = _Plot(width, 0.0, last or 1.0, [])
    shapes = []
    for row, (who, spans) in enumerate(rows.items()):
        top = TOP + row * LANE
        shapes.append(f'<text x="0" y="{top + LANE / 2 + 4:.1f}">{escape(who)}</text>')
        for what, start, end in spans:
            place = f'x="{plot.x(start):.1f}" y="{top + 2}" width="{max(plot.x(end) - plot.x(start), 0.5):.1f}"'
            tip = f"<title>{escape(who)}: {escape(what)}, {start:.1f} s to {end:.1f} s</title>"
            colour = f"var(--c{kinds.index(what) % COLOURS})"
            shapes.append(f'<rect {place} height="{LANE - 4}" fill="{colour}">{tip}</rect>')
    return plot.svg(shapes, "seconds", height=TOP + len(rows) * LANE + BOTTOM) + legend(kinds)


def legend(labels: Sequence[str]) -> str:
    """Names and colours of the curves, below a chart."""
    entries = (
        f'<span><i style="background:var(--c{index % COLOURS})"></i>{escape(label)}</span>'
        for index, label in enumerate(labels)
    )
    return f'<div class="legend">{"".join(entries)}</div>'


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, that enclose ``low`` to ``high``."""
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        margin = abs(high) / 2 or 0.5
        low, high = low - margin, high + margin
    raw = (high - low) / about
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


class _Plot:
    """The frame of a chart: from data to pixels, axes and grid."""

    def __init__(self, width: int, x_low: float, x_high: float, y_ticks: list[float]):
        if x_low == x_high:
            x_low, x_high = x_low - 0.5, x_high + 0.5
        self.width, self.x_low, self.x_high, self.y_ticks = width, x_low, x_high, y_ticks

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def svg(self, shapes: Sequence[str], x_label: str, percent: bool = False, height: int = HEIGHT) -> str:
        grid = []
        for tick in self.y_ticks:
            text = f"{tick * 100:.4g}%" if percent else f"{tick:.4g}"
            y = self.y(tick)
            grid.append(f'<line x1="{LEFT}" x2="{self.width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            grid.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for tick in ticks(self.x_low, self.x_high, about=8):
            if tick == int(tick) and self.x_low <= tick <= self.x_high:
                grid.append(
                    f'<text x="{self.x(tick):.1f}" y="{height - BOTTOM + 17}" text-anchor="middle">{tick:g}</text>'
                )
        middle = (LEFT + self.width - RIGHT) / 2
        grid.append(f'<text x="{middle}" y="{height - 4}" text-anchor="middle">{escape(x_label)}</text>')
        return f'<svg viewBox="0 0 {self.width} {height}" role="img">{"".join(grid)}{"".join(shapes)}</svg>'
