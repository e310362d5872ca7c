"""Did a change of the code change a number? A short run of every algorithm before and after, compared bit for bit.

    python -m benchmarks.same_numbers run outputs/before          # in the old checkout
    python -m benchmarks.same_numbers run outputs/after           # in the new one, on the same machine
    python -m benchmarks.same_numbers compare outputs/before outputs/after

The runs are the quickstart's task with the settings of `benchmarks.compare_algorithms`, two steps each, with the
rollout in the training worker (`colocated`) and in a server (`separate`); `--set` adds settings to each of them. The
one called `quickstart` is the whole quickstart where `--quickstart` asks for it. Every metric but the clock's is
compared, and the exported weights. An old checkout whose file of this name knows less is run by this one, from there:

    PYTHONPATH=. python NEW_CHECKOUT/benchmarks/same_numbers.py run outputs/before
"""

import argparse
import hashlib
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.compare_algorithms import ALGORITHMS, settings
from verl_omni.utils.run_files import read_metrics

CLOCK = ("timing", "perf/", "idle/", "queue/")  # what no two runs share
EXPORTED = "global_step_*/export/**/*.safetensors"
# Where samples are drawn -> (end of the run's name, settings)
MODES = {"colocated": ("", []), "separate": ("_separate", ["actor_rollout_ref.hybrid_engine=false"])}


def run_all(out: Path, steps: int, quickstart: bool, names: list[str], modes: list[str], more: list[str]) -> None:
    """Runs that are already whole are not repeated."""
    commands = {}
    for name in names:
        for end, where in (MODES[mode] for mode in modes):
            commands[f"{name.replace(' ', '_')}{end}"] = [*settings(name, 0, steps), "trainer.save_freq=-1", *where]
    if quickstart:
        commands["quickstart"] = []
    for name, overrides in commands.items():
        run(out, name, [*overrides, *more])


def run(out: Path, name: str, overrides: list[str]) -> None:
    from verl_omni.quickstart.__main__ import training_command

    folder, log, asked = out / name, out / f"{name}.log", out / f"{name}.settings"
    said = "\n".join(overrides) + "\n"
    if list(folder.glob("global_step_*/export")):
        if asked.is_file() and asked.read_text() != said:
            sys.exit(f"error: {folder} holds a run of other settings, which are in {asked}: choose another folder")
        return
    print(f"{name} ...", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    asked.write_text(said)
    with log.open("w") as f:
        command = training_command(out, folder, [*overrides, "trainer.resume_mode=disable"])
        code = subprocess.run(command, stdout=f, stderr=subprocess.STDOUT).returncode
    if code:
        sys.exit(f"error: the run in {folder} failed; its output is in {log}")


def numbers(folder: Path) -> dict[str, str]:
    """Name -> value of all that a run computed, as text that is exact."""
    found = {}
    for entry in read_metrics(folder / "metrics.jsonl"):
        for name, value in entry["data"].items():
            if not name.startswith(CLOCK):
                found[f"step {entry['step']} {name}"] = json.dumps(value)
    for path in sorted(folder.glob(EXPORTED)):
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def differences(before: Path, after: Path) -> dict[str, list[str]]:
    """Run -> what differs in it. A run that is on one side only, or not whole there, differs as a whole."""
    runs = {path.parent.name for side in (before, after) for path in side.glob("*/metrics.jsonl")}
    runs |= {path.stem for side in (before, after) for path in side.glob("*.settings")}  # also what failed on both
    result = {}
    for run in sorted(runs):
        sides = [side / run for side in (before, after)]
        result[run] = [line for side in sides for line in lacking(side)]
        if not result[run]:
            one, other = (numbers(side) for side in sides)
            names = [*one, *sorted(other.keys() - one.keys() - added(one, other))]
            result[run] = [
                f"{name}: {one.get(name, 'absent')} -> {other.get(name, 'absent')}"
                for name in names
                if one.get(name) != other.get(name)
            ]
    return result


def lacking(run: Path) -> list[str]:
    """What a run has to have before two can be the same."""
    if not (run / "metrics.jsonl").is_file():
        return [f"there is no {run}"]
    found = []
    if not read_metrics(run / "metrics.jsonl"):
        found.append(f"{run} has no step in its metrics.jsonl")
    if not list(run.glob(EXPORTED)):
        found.append(f"{run} has no exported weights")
    return found


def added(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Metrics that the later run has at steps of both, and the earlier one at none: they change none that was there."""
    steps, metrics = ({name.split(" ", 2)[i] for name in before if name.startswith("step ")} for i in (1, 2))
    new = (name.split(" ", 2) for name in after.keys() - before.keys() if name.startswith("step "))
    return {" ".join(name) for name in new if name[1] in steps and name[2] not in metrics}


def additions(before: Path, after: Path) -> list[str]:
    found = set()
    for path in before.glob("*/metrics.jsonl"):
        found |= {name.split(" ", 2)[2] for name in added(numbers(path.parent), numbers(after / path.parent.name))}
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train with every algorithm")
    run.add_argument("out", type=Path, help="folder of the runs")
    run.add_argument("--steps", type=int, default=2, help="training steps of each (%(default)s)")
    run.add_argument("--quickstart", action="store_true", help="the whole quickstart too")
    run.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    run.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES), help="where it draws (both)")
    run.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings of every run")
    compare = commands.add_parser("compare", help="compare two such folders")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run_all(options.out, options.steps, options.quickstart, options.only, options.modes, options.set)
        return
    found = differences(options.before, options.after)
    if not found:
        sys.exit(f"error: neither {options.before} nor {options.after} holds a run")
    for name, different in found.items():
        print(f"{name}: {'the same' if not different else f'{len(different)} differ'}")
        for line in different[:5]:
            print(f"    {line}")
    if not any(found.values()) and (new := additions(options.before, options.after)):
        print(f"new: {', '.join(new)}")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
