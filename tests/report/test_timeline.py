"""Who did what when: what is written of it, and where it is drawn."""

import json
import re
import time

from verl_omni.report.charts import lanes
from verl_omni.report.report import write_report
from verl_omni.report.timeline import FILE, SHOWN, Timeline, timeline_chart


def noted(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def rectangles(svg: str) -> dict[str, tuple[float, ...]]:
    """x, y and width of each, by its tip."""
    found = re.findall(r'<rect x="(.*?)" y="(.*?)" width="(.*?)" .*?<title>(.*?)</title>', svg)
    return {tip: tuple(map(float, numbers)) for *numbers, tip in found}


def test_a_line_a_step_with_what_has_ended_since(tmp_path):
    timeline, now = Timeline(), time.perf_counter()
    timeline.add("rollout 0", "drawing", now - 5, now - 2)
    timeline.write_to(tmp_path)
    timeline.add_stages([("gen", now - 2, now - 1), ("update_actor", now - 1, now)])
    timeline.write(1)
    timeline.add("rewards", "scoring", now - 2, now)
    timeline.write(2)
    first, second = (entry["data"]["spans"] for entry in noted(tmp_path))
    assert [span[:2] for span in first] == [["rollout 0", "drawing"], ["training", "learning"]]  # waiting is no work
    assert [span[:2] for span in second] == [["rewards", "scoring"]]
    assert abs(first[0][3] - first[0][2] - 3) < 0.01 and abs(time.time() - second[0][3]) < 60  # seconds since 1970


def test_a_run_that_goes_on_keeps_the_steps_before(tmp_path):
    for resumed in (None, 1):
        timeline = Timeline()
        timeline.write_to(tmp_path, resumed)
        for step in (1, 2) if resumed is None else (2,):
            timeline.add("training", f"start {resumed}", 0, 1)
            timeline.write(step)
    assert [entry["data"]["spans"][0][1] for entry in noted(tmp_path)] == ["start None", "start 1"]


def test_without_a_file_nothing_is_kept(tmp_path):
    timeline = Timeline()
    timeline.add("rollout 0", "drawing", 0, 1)
    timeline.write(1)
    assert not list(tmp_path.iterdir()) and timeline_chart(tmp_path, 100) == ""


def test_lanes_are_in_proportion():
    svg = lanes({"training": [("learning", 0, 4)], "rollout 0": [("drawing", 1, 2), ("weights", 2, 4)]}, width=500)
    drawn = rectangles(svg)
    learning, drawing, weights = (
        drawn[tip]
        for tip in (
            "training: learning, 0.0 s to 4.0 s",
            "rollout 0: drawing, 1.0 s to 2.0 s",
            "rollout 0: weights, 2.0 s to 4.0 s",
        )
    )
    second = learning[2] / 4
    assert abs(drawing[2] - second) < 0.2 and abs(weights[2] - 2 * second) < 0.2
    assert abs(drawing[0] - learning[0] - second) < 0.2
    assert drawing[1] == weights[1] > learning[1]  # one row below


def test_the_report_shows_the_last_steps_training_above(tmp_path):
    timeline = Timeline()
    timeline.write_to(tmp_path)
    for step in range(1, SHOWN + 3):
        for who, what in (("rewards", "scoring"), ("rollout 1", "drawing"), ("training", "learning")):
            timeline.add(who, what, 10.0 * step, 10.0 * step + 5)
        timeline.write(step)
    data = {"critic/rewards/mean": 0.5, "timing_s/step": 10.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": data}) + "\n")
    page = write_report(tmp_path).read_text()
    drawn = rectangles(page[page.index("Who did what in the last steps") :])
    assert len(drawn) == 3 * SHOWN and "training: learning, 0.0 s to 5.0 s" in drawn
    rows = {tip.split(":")[0]: place[1] for tip, place in drawn.items()}
    assert rows["training"] < rows["rollout 1"] < rows["rewards"]
