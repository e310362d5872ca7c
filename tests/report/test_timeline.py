"""Who did what when: what is written of it, and where it is drawn."""

import json
import time

from verl_omni.report.report import write_report
from verl_omni.report.timeline import FILE, SHOWN, Timeline, timeline_chart


def noted(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


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
    assert not list(tmp_path.iterdir()) and timeline_chart(tmp_path, "a") is None


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
    charts = json.loads(page.split('id="chart-data">')[1].split("</script>")[0])
    (chart,) = (chart for chart in charts if chart["heading"] == "Who did what in the last steps")
    assert [row["who"] for row in chart["rows"]] == ["training", "rollout 1", "rewards"]
    assert [len(row["spans"]) for row in chart["rows"]] == [SHOWN] * 3
    assert chart["rows"][0]["spans"][:2] == [["learning", 0.0, 5.0], ["learning", 10.0, 15.0]]
