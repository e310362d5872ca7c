"""Settings that are measured beside each other: what one does leaves the others alone, and each is timed by itself."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.side_by_side import Turns

SCRIPT = """
import sys, torch
from pathlib import Path
from test_side_by_side import fails, holds, measures, never_ends, notes
from benchmarks.side_by_side import Setting, run_all
out = Path(sys.argv[1])
settings = [Setting("fails", 4, fails, ()), Setting("never ends", 4, never_ends, (), seconds=1.0),
            Setting("one", 4, measures, (out,)), Setting("two", 4, measures, (out,)),
            Setting("large", 9, measures, (out,))]
(out / "logs").mkdir()
(out / "logs/never_ends.json").write_text('{"of": "an earlier call"}')
run_all(settings, out, gib=16, seconds=60)
again = [Setting("fails", 4, measures, (out,)), Setting("one", 4, fails, ())]
run_all(again, out, gib=16, seconds=60)
narrow = [Setting(name, 4, notes, (out, name)) for name in "abcd"]
run_all([Setting("holds", 9, holds, (out,)), Setting("wide", 9, notes, (out, "w")), *narrow], out / "more", 16, 60, 2)
run_all([Setting("too large", 20, measures, (out,)), Setting("late", 4, measures, (out,))], out / "more", 16, 0.05)
"""


def measures(out: Path, turns: Turns) -> dict[str, float]:
    with turns.together():
        alone = not (out / "timed").exists()
        time.sleep(0.1)
    with turns.alone():
        alone &= not (out / "timed").exists()
        (out / "timed").touch()
        time.sleep(0.3)  # long enough for the others to come in, were they not held back
        (out / "timed").unlink()
    return {"alone": float(alone)}


def notes(out: Path, name: str, turns: Turns) -> dict[str, float]:
    with (out / "begun").open("a") as file:
        file.write(name)
    return {}


def holds(out: Path, turns: Turns) -> dict[str, float]:
    while not (out / "begun").exists() or len((out / "begun").read_text()) < 3:
        time.sleep(0.1)
    time.sleep(1.0)  # long enough for one more to begin, were it let
    return {}


def fails(turns: Turns) -> dict[str, float]:
    raise MemoryError("no room\nfor more")


def never_ends(turns: Turns) -> dict[str, float]:
    signal.pause()
    return {}


def test_one_that_fails_or_hangs_leaves_the_others_alone(tmp_path):
    here = Path(__file__)
    done = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], capture_output=True, text=True, timeout=120,
                          env={"PYTHONPATH": f"{here.parent}:{here.parents[2]}", "PATH": "/usr/bin:/bin"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert "fails: error MemoryError: no room" in done.stdout and "never ends: error ended after 1 s" in done.stdout
    more = json.loads((tmp_path / "more/found.json").read_text())
    assert "error" in more["too large"] and more["late"] == {"error": "not begun: the time was up"}
    assert [found[name]["alone"] for name in ("one", "two", "large")] == [1.0, 1.0, 1.0]
    assert "large: alone 1.00" in done.stdout
    # one that does not fit beside another is overtaken three times, not by all
    assert (tmp_path / "begun").read_text() == "abcwd"
    # called again: what failed is measured now, and what was found before is not
    assert found["fails"]["alone"] == 1.0 and done.stdout.count("one: ") == 1
