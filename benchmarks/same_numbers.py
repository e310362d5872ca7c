"""Did a change of the code change a number? A short run of every algorithm before and after, compared bit for bit.

    python -m benchmarks.same_numbers run outputs/before          # in the old checkout
    python -m benchmarks.same_numbers run outputs/after           # in the new one, on the same machine
    python -m benchmarks.same_numbers compare outputs/before outputs/after

The runs are the quickstart's task with the settings of `benchmarks.compare_algorithms`, two steps each; the one called
`quickstart` is the whole quickstart where `--quickstart` asks for it. Every metric but the clock's is compared, and the
exported weights.
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


def run_all(out: Path, steps: int, quickstart: bool, names: list[str]) -> None:
    """Runs that are already whole are not repeated."""
    from verl_omni.quickstart.__main__ import training_command

    commands = {name.replace(" ", "_"): [*settings(name, 0, steps), "trainer.save_freq=-1"] for name in names}
    if quickstart:
        commands["quickstart"] = []
    for name, overrides in commands.items():
        folder = out / name
        if not list(folder.glob("global_step_*/export")):
            print(f"{name} ...", flush=True)
            log = out / f"{name}.log"
            out.mkdir(parents=True, exist_ok=True)
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
    for path in sorted(folder.glob("global_step_*/export/**/*.safetensors")):
        found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def differences(before: Path, after: Path) -> dict[str, list[str]]:
    """Run -> what differs in it; a run that is on one side only differs as a whole."""
    runs = {path.parent.name for side in (before, after) for path in side.glob("*/metrics.jsonl")}
    result = {}
    for run in sorted(runs):
        sides = [side / run for side in (before, after)]
        missing = [str(side) for side in sides if not (side / "metrics.jsonl").is_file()]
        if missing:
            result[run] = [f"there is no {' and no '.join(missing)}"]
            continue
        one, other = (numbers(side) for side in sides)
        result[run] = [
            f"{name}: {value} -> {other.get(name, 'absent')}" for name, value in one.items() if value != other.get(name)
        ]
    return result


def additions(before: Path, after: Path) -> list[str]:
    """Metrics that the later runs have in addition: a new one changes none that was there."""
    found = set()
    for path in before.glob("*/metrics.jsonl"):
        one, other = numbers(path.parent), numbers(after / path.parent.name)
        found |= {name.split(" ")[-1] for name in other.keys() - one.keys()}
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="train with every algorithm")
    run.add_argument("out", type=Path, help="folder of the runs")
    run.add_argument("--steps", type=int, default=2, help="training steps of each (%(default)s)")
    run.add_argument("--quickstart", action="store_true", help="the whole quickstart too")
    run.add_argument("--only", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    compare = commands.add_parser("compare", help="compare two such folders")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "run":
        run_all(options.out, options.steps, options.quickstart, options.only)
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
