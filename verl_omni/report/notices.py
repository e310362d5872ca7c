"""What a run warns of: said on the console, and kept in `notices.jsonl` of its folder for the page and the report."""

import json
import sys
from contextlib import suppress
from pathlib import Path

from verl_omni.utils.json_files import parse_object

FILE = "notices.jsonl"
MOST = 50  # shown, the last ones


def notice(run_dir: str | Path, line: str, step: int | None = None) -> None:
    """Say it, and keep it."""
    from tqdm import tqdm

    line = line if step is None else f"step {step}: {line}"
    tqdm.write(line)  # above a progress bar, where there is one
    sys.stdout.flush()
    try:
        with (Path(run_dir) / FILE).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"step": step, "line": line}) + "\n")
    except OSError as error:  # a full disk ends a run where there is something to save, not at a warning
        with suppress(OSError):  # the log lies on the same disk
            print(f"{FILE} cannot be written: {error}", file=sys.stderr, flush=True)


def read_notices(run_dir: str | Path) -> list[str]:
    path = Path(run_dir) / FILE
    whole = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.is_file() else []
    return [str(parse_object(line, f"a line of {path}").get("line")) for line in whole[-MOST:] if line.endswith("}")]
