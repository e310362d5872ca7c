"""Try bad inputs and faults on the real command, and write down what a user sees.

    python tests/reliability/trial.py                            # all of them, about an hour on two cores
    python tests/reliability/trial.py --only "Ctrl-C" --jobs 2   # those whose kind, theme or name matches
    python tests/reliability/trial.py --write docs/reliability.md

Results are appended to a file as they come; cases that are in it are not tried again, unless with --again (all) or
--failed (those that failed). --write fills the tables of a document from that file and tries nothing.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def all_cases() -> list[Any]:
    import cases_faults
    import cases_files
    import cases_resuming
    import cases_settings

    return [*cases_settings.CASES, *cases_files.CASES, *cases_resuming.CASES, *cases_faults.CASES]


def title(case: Any) -> str:
    return f"{case.kind}: {case.theme}: {case.name}"


def attempt(case: Any, folder: Path) -> dict[str, Any]:
    import faults
    import inputs

    result = {"kind": case.kind, "theme": case.theme, "name": case.name}
    try:
        result |= (inputs if case.kind == "input" else faults).attempt(case, folder)
    except Exception as error:  # of the trial, not of the command: the other cases go on
        why = [f"the trial itself failed: {error!r}"]
        result |= {"seconds": 0.0, "code": None, "line": "", "lines": 0, "why": why, "same": False}
    return result | {"passed": "skipped" in result or not result["why"]}


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last result of each case, by title."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {f"{r['kind']}: {r['theme']}: {r['name']}": r for r in rows}


def try_all(cases: list[Any], results: Path, jobs: int, keep: bool) -> list[dict[str, Any]]:
    from e2e_runs import prompts
    from tiny_models import tiny_checkpoint
    from tqdm import tqdm

    tiny_checkpoint(), prompts()  # once, before there are threads
    root = Path(tempfile.mkdtemp(prefix="trial-"))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    found = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool, tqdm(total=len(cases), unit="case") as bar:
        waiting = {pool.submit(attempt, case, root / str(i)): (i, case) for i, case in enumerate(cases)}
        for done in concurrent.futures.as_completed(waiting):
            i, case = waiting[done]
            result = done.result() | {"commit": commit.stdout.strip(), "machine": machine()}
            found.append(result)
            with results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            if not result["passed"]:
                bar.write(f"fails: {title(case)}\n    {'; '.join(result['why'])}\n    {result['line'][:300]}")
            if not keep:
                shutil.rmtree(root / str(i), ignore_errors=True)
            bar.update()
    return found


def machine() -> str:
    import ray
    import torch

    cores, today = len(os.sched_getaffinity(0)), datetime.date.today()
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return f"on {today}, on {cores} CPU cores, with {python}, torch {torch.__version__} and Ray {ray.__version__}"


def write(document: Path, results: Path) -> None:
    import table

    from verl_omni.report.document_tables import fill

    known = read(results)
    ordered = [known[title(case)] for case in all_cases() if title(case) in known]
    where = sorted({r["machine"] for r in ordered})
    commits = list(dict.fromkeys(r["commit"] for r in ordered))
    again = " A case that failed was tried again when it was mended." if len(commits) > 1 else ""
    tried = f"Tried {'; '.join(where)}, at {' and '.join(commits)}.{again}"
    text = fill(document.read_text(), "MACHINE", tried)
    text = fill(text, "INPUTS", table.inputs_table([r for r in ordered if r["kind"] == "input"]))
    text = fill(text, "FAULTS", table.faults_table([r for r in ordered if r["kind"] == "fault"]))
    document.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression that kind, theme and name have to match")
    parser.add_argument("--jobs", type=int, default=1, help="cases at the same time")
    parser.add_argument("--results", type=Path, default=ROOT / "outputs/reliability.jsonl")
    parser.add_argument("--again", action="store_true", help="also what was tried already")
    parser.add_argument("--failed", action="store_true", help="also what was tried already and failed")
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    parser.add_argument("--list", action="store_true", help="print the cases and try nothing")
    parser.add_argument("--write", type=Path, help="fill the tables of this document from the results")
    options = parser.parse_args()
    if options.write:
        write(options.write, options.results)
        return 0
    cases = [case for case in all_cases() if re.search(options.only, title(case))]
    if options.list:
        print("\n".join(title(case) for case in cases))
        return 0
    known = {} if options.again else read(options.results)
    cases = [c for c in cases if title(c) not in known or options.failed and not known[title(c)]["passed"]]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    found = try_all(cases, options.results, options.jobs, options.keep)
    failed = [r for r in found if not r["passed"]]
    print(f"{len(found)} tried, {len(failed)} failed; results in {options.results}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    sys.path[:0] = [str(ROOT), str(HERE.parent), str(HERE.parent / "e2e")]
    sys.exit(main())
