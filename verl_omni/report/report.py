"""One self-contained HTML page about a training run, and its before/after table for the console.

    python -m verl_omni.report.report RUN_DIR

Reads what the trainer writes into its run folder: ``metrics.jsonl``, ``config.yaml``, ``starts.jsonl``,
``timeline.jsonl`` and ``validation/step_<N>/`` with images and ``samples.jsonl``. Every run ends with it.
"""

from html import escape
from pathlib import Path

from verl_omni.report import run_charts
from verl_omni.report.assets import CHART_SCRIPTS, asset, style
from verl_omni.report.charts import as_figures, as_script
from verl_omni.report.galleries import before_and_after, best_and_worst, section
from verl_omni.report.run import Run
from verl_omni.report.summary import about, facts, title_of
from verl_omni.utils.options import Parser
from verl_omni.utils.readable import readable


def write_report(
    run_dir: str | Path,
    out_path: str | Path | None = None,
    title: str | None = None,
    continue_command: str | None = None,
) -> Path:
    """Write the report of a run and return its path, ``report.html`` in the run folder by default.

    ``title`` is by default what the config says about the run (``recipe``), or its algorithm and model.
    ``continue_command`` is shown as what to type to train on from here.
    """
    run = Run(run_dir)
    title = title or title_of(run)
    out_path = Path(out_path) if out_path else run.dir / "report.html"
    groups = {"Learning": run_charts.learning(run), "Time": run_charts.time(run), "Memory": run_charts.memory(run)}
    charts = [chart for group in groups.values() for chart in group]
    drawn = {name: as_figures(group, first=charts.index(group[0])) for name, group in groups.items() if group}
    sections = [
        _headline(run, title),
        before_and_after(run.validations()),
        best_and_worst(run.dir),
        *(section(name, figures) for name, figures in drawn.items()),
        section(
            "Go on from here", f'<pre class="command">{escape(continue_command)}</pre>' if continue_command else ""
        ),
        section("Started with", _about(run)),
        _config(run),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style()}</style></head>\n<body><main>\n"
        + "\n".join(filter(None, sections))
        + "\n</main>\n"
        + as_script(charts)
        + "".join(f"\n<script>{asset(name)}</script>" for name in CHART_SCRIPTS)
        + "\n</body></html>\n"
    )
    out_path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out_path.with_name(out_path.name + ".tmp")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(out_path)
    return out_path


def format_before_after_table(run_dir: str | Path) -> str:
    """The numbers before and after training as a table of plain text."""
    rows = [("", "before", "after", "change")]
    for change in Run(run_dir).changes():
        difference = change.after - change.before
        rows.append((change.label, readable(change.before), readable(change.after), readable(difference, sign="+")))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{row[0]:<{widths[0]}}  " + "  ".join(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def _headline(run: Run, title: str) -> str:
    cards = []
    for change in run.changes():
        difference = change.after - change.before
        trend = "up" if difference > 0 else "down" if difference < 0 else "flat"
        cards.append(
            f'<div class="card"><div class="label">{escape(change.label)}</div>'
            f'<div class="value">{readable(change.before)} <span class="arrow">→</span> '
            f"{readable(change.after)}</div>"
            f'<div class="{trend}">{readable(difference, sign="+")}, '
            f"step {change.steps[0]} to {change.steps[1]}</div></div>"
        )
    return (
        f'<header><h1>{escape(title)}</h1><p class="facts">{" · ".join(facts(run))}</p></header>'
        f'<div class="cards">{"".join(cards)}</div>'
    )


def _about(run: Run) -> str:
    """What made this run: enough to make it again."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(said)}</dd>" for name, said in about(run).items())
    command = run.starts[-1]["command"] if run.starts else None
    shown = f'<pre class="command">{escape(command)}</pre>' if command else ""
    return f'<dl class="about">{rows}</dl>{shown}' if rows else ""


def _config(run: Run) -> str:
    if run.config is None:
        return ""
    return f"<section><details><summary>Config</summary><pre>{escape(run.config)}</pre></details></section>"


def main() -> None:
    parser = Parser(description="Write report.html about a training run.")
    parser.add_argument("run_dir", metavar="RUN_DIR", help="folder with metrics.jsonl, config.yaml and validation/")
    parser.add_argument("--out", help="default: report.html in the run folder")
    parser.add_argument("--title", help="default: the config's `recipe`")
    parser.add_argument("--continue-command", help="what to type to train on, shown in the report")
    args = parser.parse_args()
    try:
        path = write_report(args.run_dir, args.out, args.title, args.continue_command)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(format_before_after_table(args.run_dir))
    print(f"Report: {path}")


if __name__ == "__main__":
    main()
