"""How many devices for what: from the stage times of one run to the step time of others.

Work is seconds times devices, as a run has measured it. Drawing and learning are taken to scale with their devices.
What rewards take, and weights and samples from one side to the other, is taken to be the same for any number of them.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_omni.utils.run_files import read_config, read_metrics

WARM_UP = 2  # steps that are not like the others
UNDER_WAY = {"separate": 1, "one_step_off": 2, "fully_async": 3}  # steps at once, as staleness is by default


@dataclass(frozen=True)
class Work:
    """Of one training step: device-seconds of drawing (until the last image) and of learning (all that comes after).

    Seconds that more devices do not make less: `scoring`, from the last image to the last reward, and `handover`, which
    weights and samples take from one side to the other.
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
            return (self.drawing + self.learning) / (training + rollout) + self.scoring
        draw, learn = self.drawing / rollout, self.learning / training
        # Each side does one thing at a time, and all that a step takes is shared by those that are under way at once.
        return max(draw, learn, (draw + self.scoring + learn) / UNDER_WAY[mode]) + self.handover

    def splits(self, devices: int) -> Iterator[tuple[str, int, int, float]]:
        """(mode, training devices, rollout devices, seconds) of every way to use so many."""
        yield "colocated", devices, 0, self.predict("colocated", devices, 0)
        for training in range(1, devices):
            for mode in ("separate", "one_step_off", "fully_async"):
                yield mode, training, devices - training, self.predict(mode, training, devices - training)


def read_work(run_dir: str | Path) -> Work:
    """What a run has measured: medians over its steps after the first ones."""
    run_dir = Path(run_dir)
    for name in ("metrics.jsonl", "config.yaml"):
        if not (run_dir / name).is_file():
            raise FileNotFoundError(f"{run_dir} is no run folder: it has no {name}")
    config = read_config(run_dir / "config.yaml")
    rows = [entry["data"] for entry in read_metrics(run_dir / "metrics.jsonl")]
    rows = [row for row in rows if "timing_s/step" in row and "timing_s/gen_images" in row]
    if len(rows) <= WARM_UP:
        raise ValueError(f"{run_dir} has {len(rows)} steps with samples of its own: {WARM_UP + 1} or more are needed")
    rows = rows[WARM_UP:]
    trainer, rollout = config["trainer"], config["actor_rollout_ref"]["rollout"]
    if (config["actor_rollout_ref"].get("actor", {}).get("teacher") or {}).get("n_gpus_per_node"):
        raise ValueError(
            f"{run_dir} has teachers on devices of their own (actor.teacher.n_gpus_per_node): plan shares out those of "
            "runs without them"
        )
    training = trainer["n_gpus_per_node"] * trainer["nnodes"]
    mode = trainer.get("mode", "colocated")
    servers = 0 if mode == "colocated" else (rollout["n_gpus_per_node"] or 1) * (rollout["nnodes"] or 1)

    def median(seconds: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(map(seconds, rows))

    step, drawing = median(lambda row: row["timing_s/step"]), median(lambda row: row["timing_s/gen_images"])
    scoring = median(lambda row: row.get("timing_s/reward", 0.0))
    learning = median(lambda row: row["timing_s/step"] - row["timing_s/gen"] - row.get("timing_s/reward", 0.0))
    in_turn = mode == "separate" or trainer.get("max_staleness") == 0 or bool(trainer.get("replay"))
    handover = 0.0
    if servers and in_turn:
        handover = max(0.0, median(lambda row: row["timing_s/gen"] - row["timing_s/gen_images"]))
    elif mode == "one_step_off":
        handover = max(0.0, step - max(drawing, learning + scoring))
        if scoring > 0.01 * step:  # this is what was left of it after the step before
            scoring += step - drawing
    return Work(drawing * (servers or training), learning * training, mode, training, servers, step, scoring, handover)


def table(work: Work, devices: int) -> str:
    """Markdown, the fastest marked."""
    found = list(work.splits(devices))
    best = min(seconds for *_, seconds in found)
    lines = ["| mode | training | rollout | s a step |", "|---|---|---|---|"]
    for mode, training, rollout, seconds in found:
        mark = "**" if seconds == best else ""
        lines.append(f"| {mode} | {training} | {rollout or '–'} | {mark}{seconds:.2f}{mark} |")
    return "\n".join(lines)
