"""How many devices for what: from the stage times of one run to the step time of others.

Work is seconds times devices, as a run has measured it. Drawing and learning are taken to scale with their devices;
what weights and samples take from one side to the other, as a run with rollout servers has measured it, is not.
"""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP = 2  # steps that are not like the others


@dataclass(frozen=True)
class Work:
    """Of one training step: device-seconds of drawing (until the last image) and of learning (all that is not that).

    `scoring` is the part of learning in which the training devices wait for rewards, `handover` the seconds in which
    servers neither draw nor have anything to draw with, while training waits for them.
    """

    drawing: float
    learning: float
    mode: str
    training: int
    rollout: int
    step: float  # measured seconds
    scoring: float = 0.0
    handover: float = 0.0

    def predict(self, mode: str, training: int, rollout: int) -> float:
        """Seconds of a step."""
        if mode == "colocated":  # all devices do both, in turn
            return (self.drawing + self.learning) / (training + rollout)
        draw, learn = self.drawing / rollout, self.learning / training
        if mode == "fully_async":  # rewards come in, and servers take weights, while other groups are learned from
            return max(draw + self.handover, learn - self.scoring / training)
        return (max(draw, learn) if mode == "one_step_off" else draw + learn) + self.handover

    def splits(self, devices: int) -> Iterator[tuple[str, int, int, float]]:
        """(mode, training devices, rollout devices, seconds) of every way to use so many."""
        yield "colocated", devices, 0, self.predict("colocated", devices, 0)
        for training in range(1, devices):
            for mode in ("separate", "one_step_off", "fully_async"):
                yield mode, training, devices - training, self.predict(mode, training, devices - training)


def read_work(run_dir: str | Path) -> Work:
    """What a run has measured: medians over its steps after the first ones."""
    import yaml

    run_dir = Path(run_dir)
    for name in ("metrics.jsonl", "config.yaml"):
        if not (run_dir / name).is_file():
            raise FileNotFoundError(f"{run_dir} is no run folder: it has no {name}")
    config: dict[str, Any] = yaml.safe_load((run_dir / "config.yaml").read_text())
    rows = [json.loads(line)["data"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "timing_s/step" in row and "timing_s/gen_images" in row]
    if len(rows) <= WARM_UP:
        raise ValueError(f"{run_dir} has {len(rows)} steps with samples of its own: {WARM_UP + 1} or more are needed")
    rows = rows[WARM_UP:]
    trainer, rollout = config["trainer"], config["actor_rollout_ref"]["rollout"]
    training = trainer["n_gpus_per_node"] * trainer["nnodes"]
    mode = trainer.get("mode", "colocated")
    servers = 0 if mode == "colocated" else (rollout["n_gpus_per_node"] or 1) * (rollout["nnodes"] or 1)
    learning = statistics.median(row["timing_s/step"] - row["timing_s/gen"] for row in rows)
    drawing = statistics.median(row["timing_s/gen_images"] for row in rows)
    scoring = statistics.median(row.get("timing_s/reward", 0.0) for row in rows)
    step = statistics.median(row["timing_s/step"] for row in rows)
    handover = {
        "colocated": 0.0,
        "separate": step - learning - drawing,
        "one_step_off": step - max(drawing, learning),
        "fully_async": step - max(drawing, learning),
    }[mode]
    return Work(
        drawing * (servers or training), learning * training, mode, training, servers, step, scoring * training,
        max(0.0, handover),
    )  # fmt: skip


def table(work: Work, devices: int) -> str:
    """Markdown, the fastest marked."""
    found = list(work.splits(devices))
    best = min(seconds for *_, seconds in found)
    lines = ["| mode | training | rollout | s a step |", "|---|---|---|---|"]
    for mode, training, rollout, seconds in found:
        mark = "**" if seconds == best else ""
        lines.append(f"| {mode} | {training} | {rollout or '–'} | {mark}{seconds:.2f}{mark} |")
    return "\n".join(lines)
