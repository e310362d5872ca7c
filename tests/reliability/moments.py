"""A user's own module that lets a trial act at a chosen moment of a run; every process of the run imports it.

It lies in the folder of the run's user. `order.json` there says what to do and when; it is done once:
`{"at": "update", "after": 1, "do": "signal", "number": 9, "who": "DiffusionWorker"}` kills the training worker in the
first update after step 1.
"""

import json
import os
import pathlib
import re
import signal
import sys
import time

HERE = pathlib.Path(__file__).parent
RUN = HERE / "run"


def moment(name: str) -> None:
    try:
        order = json.loads((HERE / "order.json").read_text())
        if order["at"] != name or last_step() < order.get("after", -1):
            return
        os.rename(HERE / "order.json", HERE / "done.json")  # by one process, once
    except FileNotFoundError:
        return
    now = {"time": time.time(), "log": (HERE / "log.txt").stat().st_size, "step": last_step()}
    (HERE / "happened").write_text(json.dumps(now))
    DEEDS[order["do"]](order)


def last_step() -> int:
    try:
        return max(json.loads(line)["step"] for line in (RUN / "metrics.jsonl").read_text().splitlines())
    except (FileNotFoundError, ValueError):
        return -1


def send(order: dict) -> None:
    for i in range(order.get("times", 1)):
        time.sleep(0.4 * (i > 0))
        for pid in who(order["who"]):
            os.kill(pid, order["number"])
    time.sleep(order.get("then_wait", 1.0))  # the moment lasts until the signal has come


def who(title: str) -> list[int]:
    """The command; all of its terminal's foreground; or another process of this run by a word of its title."""
    command = int((HERE / "driver").read_text())
    if title == "command":
        return [command]
    if title == "foreground":  # what Ctrl-C reaches
        return [pid for pid in mine() if os.getpgid(pid) == command]
    titles = {pid: pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in mine() if pid != command}
    return [pid for pid, words in titles.items() if title in words][:1]


def mine() -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if str(HERE).encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


def starve(order: dict) -> None:
    """No more memory for this process than it has, and then it asks for more."""
    import resource

    import torch

    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20,) * 2)
    torch.ones(2**28)


def fill(order: dict) -> None:
    """Leave so many bytes on the disk of the run's folder."""
    free = os.statvfs(RUN).f_bavail * os.statvfs(RUN).f_frsize
    (RUN / "ballast").write_bytes(b"\0" * (free - order["leave"]))


def raise_(error: BaseException) -> None:
    raise error


DEEDS = {
    "signal": send,
    "hang": lambda order: time.sleep(3600),
    "block": lambda order: re.match(r"(a+)+$", "a" * 60 + "b"),  # for years, with Python's lock held
    "sys.exit": lambda order: sys.exit(3),
    "os._exit": lambda order: os._exit(3),
    "raise": lambda order: raise_(ConnectionError("the judge is gone")),
    "KeyboardInterrupt": lambda order: raise_(KeyboardInterrupt()),
    "crash": lambda order: os.kill(os.getpid(), signal.SIGSEGV),
    "starve": starve,
    "fill": fill,
    "touch": lambda order: (RUN / order["file"]).touch(),
}


def compute_score(image, prompt):
    """The reward of all these runs: brightness."""
    moment("rewards")
    pixels = image.convert("L").getdata()
    return sum(pixels) / len(pixels) / 255


def before(owner: object, method: str, name) -> None:
    """Call `moment` at the start of a method."""
    original = getattr(owner, method)

    def wrapped(*args, **kwargs):
        moment(name() if callable(name) else name)
        return original(*args, **kwargs)

    setattr(owner, method, wrapped)


def during(owner: object, method: str, flag: str) -> None:
    original = getattr(owner, method)

    def wrapped(*args, **kwargs):
        (HERE / flag).touch()
        try:
            return original(*args, **kwargs)
        finally:
            (HERE / flag).unlink()

    setattr(owner, method, wrapped)


def watch() -> None:
    from verl_omni.trainer.diffusion.base_trainer import BaseRayDiffusionTrainer
    from verl_omni.workers.engine import checkpoint_io
    from verl_omni.workers.engine.base import DiffusionEngine
    from verl_omni.workers.rollout.diffusers_rollout import DiffusersRollout

    during(BaseRayDiffusionTrainer, "validate", "validating")
    before(DiffusionEngine, "initialize", "loading")
    before(DiffusersRollout, "run_batch", lambda: "validation" if (HERE / "validating").exists() else "rollout")
    before(DiffusionEngine, "optimizer_step", "update")
    before(checkpoint_io, "export", "save")


if __name__ == "moments":  # as a module of the run; the reward's copy of this file has another name
    watch()
