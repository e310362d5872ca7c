"""Which pool of devices did what when: noted while a run goes on, one line a step in `timeline.jsonl`, and drawn."""

import time
from pathlib import Path

from verl_omni.report.charts import Chart, lanes
from verl_omni.report.tracking import JsonLines
from verl_omni.utils.run_files import read_metrics

FILE = "timeline.jsonl"
SHOWN = 8  # steps, the last ones
# The stages of a step in which the training workers compute; in the others they wait.
TRAINING = {
    "ref": "reference",
    "old_log_prob": "old log-probabilities",
    "update_actor": "learning",
    "testing": "validation",
}

Span = tuple[str, str, float, float]  # who, what, from, to: seconds of time.perf_counter


class Timeline:
    """Spans of time, from any thread."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lines: JsonLines | None = None
        self._date = time.time() - time.perf_counter()

    def write_to(self, run_dir: str | Path, resumed_step: int | None = None) -> None:
        """From now on there is a file, as there is one of the metrics: see `JsonLines`."""
        self._lines = JsonLines(Path(run_dir) / FILE, resumed_step)

    def add(self, who: str, what: str, start: float, end: float) -> None:
        self._spans.append((who, what, start, end))

    def add_stages(self, spans: list[tuple[str, float, float]]) -> None:
        """The stages of a training step: (name, from, to)."""
        for name, start, end in spans:
            if name in TRAINING:
                self.add("training", TRAINING[name], start, end)

    def write(self, step: int) -> None:
        """The line of a step: what has ended since the one before. Times are seconds since 1970."""
        spans, self._spans = self._spans, []
        if self._lines is not None:
            dated = [[who, what, *(round(self._date + t, 3) for t in times)] for who, what, *times in spans]
            self._lines.log({"spans": dated}, step)


def timeline_chart(run_dir: str | Path, heading: str) -> Chart | None:
    """The last steps of a run, one row for each pool; none for a run that noted none."""
    path = Path(run_dir) / FILE
    entries = read_metrics(path)[-SHOWN:] if path.is_file() else []
    spans = [span for entry in entries for span in entry["data"]["spans"]]
    if not spans:
        return None
    first = min(start for *_, start, _ in spans)
    rows: dict[str, list[tuple[str, float, float]]] = {}
    for who, what, start, end in sorted(spans, key=lambda span: _row(span[0])):
        rows.setdefault(who, []).append((what, start - first, end - first))
    return lanes(heading, rows)


def _row(who: str) -> tuple[int, str]:
    """Training above, then the servers, rewards below."""
    return (0 if who == "training" else 2 if who == "rewards" else 1, who)
