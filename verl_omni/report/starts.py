"""When, where and with which code a run was started: one line a start in `starts.jsonl` of its folder.

Nothing here is read back by training; it is for the people who look at a run later.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import verl_omni
from verl_omni.utils.json_files import parse_object
from verl_omni.utils.masking import masked_argument

FILE = "starts.jsonl"


def note_start(run_dir: str | Path, step: int, command: str | None) -> None:
    """Add this start of a run, at its step. `command` is None where it was not typed in this process."""
    start = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "step": step,
        "verl_omni": verl_omni.__version__,
        "code": code_commit(Path(verl_omni.__file__)),
        "commit": commit(Path.cwd()),
        "machine": machine(),
        "command": command,
    }
    with (Path(run_dir) / FILE).open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(start) + "\n")


def read_starts(run_dir: str | Path) -> list[dict[str, Any]]:
    """The starts of a run, the first one first; none for a folder that was never noted."""
    path = Path(run_dir) / FILE
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.is_file() else []
    whole = [line for line in lines if line.endswith("}")]  # a full disk may have cut one off
    return [parse_object(line, f"a line of {path}") for line in whole]


def typed_command() -> str:
    """The command of this process, as one would type it again, but for keys and passwords."""
    return shlex.join(["python", *map(masked_argument, sys.orig_argv[1:])])


def code_commit(file: Path) -> str | None:
    """The commit that the installed code is of: its checkout's, or what pip noted; None where neither is known."""
    if output_of("git", "-C", str(file.parent), "ls-files", "--error-unmatch", file.name) is not None:
        return commit(file.parent)
    try:  # an environment may lie in a checkout of something else
        origin = json.loads(metadata.distribution("verl-omni").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return None
    return origin.get("vcs_info", {}).get("commit_id", "")[:12] or None


def commit(folder: Path) -> str | None:
    """The git commit of the checkout around `folder`, with `+` where files differ from it; None where there is none."""
    head = output_of("git", "-C", str(folder), "rev-parse", "HEAD")
    if head is None:
        return None
    changed = output_of("git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no")
    return head[:12] + ("+" if changed else "")


def machine() -> str:
    """Such as `node7: 8 x NVIDIA H200, 192 cores of AMD EPYC 9654, Linux`."""
    gpus = (output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "").splitlines()
    kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return f"{platform.node()}: " + ", ".join([*kinds, f"{os.cpu_count()} cores{_processor()}", platform.system()])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f" of {name or platform.processor()}" if name or platform.processor() else ""


def output_of(program: str, *arguments: str) -> str | None:
    """What a program of the machine prints; None where it is not there or has nothing to say."""
    if shutil.which(program) is None:
        return None
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
