"""Files that pages are made of: the style, the charts and the library that draws them."""

import functools
from pathlib import Path

WEB = Path(__file__).parent / "web"
CHART_SCRIPTS = ("uPlot.iife.min.js", "charts.js")
STYLES = ("uPlot.min.css", "style.css")


@functools.cache
def asset(name: str) -> str:
    return (WEB / name).read_text(encoding="utf-8")


def style() -> str:
    return "\n".join(map(asset, STYLES))
