"""Faults: processes that die, disks that fill up, checkpoints that rot, two runs in one folder, surroundings."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM

from faults import Fault, after_seconds, command, interrupted, is_running, kill_when, signal_when
from watch import Run, end_of


def order(at: str, who: str, number: int, after: int = 1, **more) -> dict:
    return {"at": at, "after": after, "do": "signal", "who": who, "number": int(number)} | more


def killed() -> list[Fault]:
    theme, nobody = "The command is killed (kill -9)", {"says": None, "clean": False}
    return [
        Fault(theme, "while Ray starts", outside=signal_when(SIGKILL, is_running("gcs_server")), **nobody),
        Fault(theme, "while the model is loaded", order("loading", "command", SIGKILL, -1), **nobody),
        Fault(theme, "in the rollout of step 2", order("rollout", "command", SIGKILL), **nobody),
        Fault(theme, "in the update of step 2", order("update", "command", SIGKILL), **nobody),
        Fault(theme, "in the validation after step 2", order("validation", "command", SIGKILL), **nobody),
        Fault(theme, "while the checkpoint of step 2 is written", order("save", "command", SIGKILL, 2), **nobody),
    ]  # fmt: skip


def asked() -> list[Fault]:
    ctrl_c, sigterm = "Ctrl-C", "SIGTERM, as a batch system sends it"
    stopped = {"says": ()}
    return [
        Fault(ctrl_c, "two seconds after the start", outside=signal_when(SIGINT, after_seconds(2), True), **stopped),
        Fault(ctrl_c, "while Ray starts", outside=signal_when(SIGINT, is_running("gcs_server"), True), **stopped),
        Fault(ctrl_c, "while the model is loaded", order("loading", "foreground", SIGINT, -1), **stopped),
        Fault(ctrl_c, "in the rollout of step 2", order("rollout", "foreground", SIGINT), **stopped),
        Fault(ctrl_c, "in the rewards of step 2", order("rewards", "foreground", SIGINT), **stopped),
        Fault(ctrl_c, "in the update of step 2", order("update", "foreground", SIGINT), **stopped),
        Fault(ctrl_c, "while a checkpoint is written", order("save", "foreground", SIGINT, 2), **stopped),
        Fault(ctrl_c, "twice, in the update of step 2", order("update", "foreground", SIGINT, times=2), **stopped),
        Fault(sigterm, "while the model is loaded", order("loading", "command", SIGTERM, -1), **stopped),
        Fault(sigterm, "in the update of step 2", order("update", "command", SIGTERM), **stopped),
        Fault(sigterm, "while a checkpoint is written", order("save", "command", SIGTERM, 2), **stopped),
        Fault("The terminal is closed (SIGHUP)", "in the update of step 2", order("update", "command", SIGHUP),
              says=None),
        Fault("Stop is pressed on the page of `verl-omni watch`", "in the update of step 2",
              {"at": "update", "after": 1, "do": "touch", "file": "stop.request"}, says=("stopped after step 2",)),
    ]  # fmt: skip


def processes_die() -> list[Fault]:
    theme = "One of its processes dies"

    def died(name: str, deed: dict, *says: str) -> Fault:
        return Fault(theme, name, deed, says=says)

    return [
        died("the driver, kill -9 in an update", order("update", "main_diffusion", SIGKILL), "run"),
        died("training worker, kill -9 while it loads", order("loading", "DiffusionWorker", SIGKILL, -1)),
        died("training worker, kill -9 in a rollout", order("rollout", "DiffusionWorker", SIGKILL), "run"),
        died("training worker, kill -9 in an update", order("update", "DiffusionWorker", SIGKILL), "run"),
        died("training worker, kill -9 in a save", order("save", "DiffusionWorker", SIGKILL, 2), "run"),
        died("training worker, SIGTERM in an update", order("update", "DiffusionWorker", SIGTERM), "run"),
        died("reward process, kill -9", order("rewards", "RewardLoopWorker", SIGKILL), "reward"),
        died("agent-loop process, kill -9", order("rollout", "DiffusionAgentLoopWorker", SIGKILL), "agent"),
        Fault(theme, "Ray's raylet, kill -9", order("rollout", "raylet/raylet", SIGKILL), says=("raylet", "SIGKILL"),
              limit=30),
        Fault(theme, "Ray's server (GCS), kill -9", order("rollout", "gcs_server", SIGKILL),
              says=("gcs_server", "SIGKILL"), limit=30),
        died("training worker out of memory (no page more)", {"at": "update", "after": 1, "do": "starve"}),
        Fault(theme, "less free memory than Ray's monitor allows", says=("memory", "RAY_memory_usage_threshold"),
              env={"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}),
    ]  # fmt: skip


def rewards() -> list[Fault]:
    # else it is asked again, or the image leaves its group, and the run goes on
    stop = ("reward.on_failure=stop", "reward.retries=0")
    theme, limit = "A reward of the user's", ("reward.timeout=10", *stop)

    def bad(name: str, deed: str, *says: str, **more) -> Fault:
        return Fault(theme, name, {"at": "rewards", "after": 1, "do": deed}, says=("compute_score", *says), **more)

    return [
        bad("hangs (reward.timeout=10)", "hang", "10", arguments=limit, again=limit),
        bad("blocks its whole process (reward.timeout=10)", "block", "blocks", arguments=limit, again=limit),
        bad("calls sys.exit", "sys.exit", "SystemExit", arguments=stop, again=stop),
        bad("raises KeyboardInterrupt", "KeyboardInterrupt", "KeyboardInterrupt", arguments=stop, again=stop),
        Fault(theme, "ends its process (os._exit)", {"at": "rewards", "after": 1, "do": "os._exit"}, says=("reward",)),
        Fault(theme, "crashes (segmentation fault)", {"at": "rewards", "after": 1, "do": "crash"}, says=("reward",)),
    ]  # fmt: skip


def unsaved() -> list[Fault]:
    """Nothing is saved before the end, by the settings: the run saves what is whole when it ends itself."""
    theme, at_the_end = "Nothing is saved yet, and the run ends itself", ("trainer.save_freq=-1",)
    saved = ("goes on from run/global_step_2", "report in run/report.html")

    def ends(name: str, deed: dict, *more: str) -> Fault:
        arguments = (*at_the_end, *more)
        return Fault(theme, name, {"after": 2} | deed, says=saved, arguments=arguments, again=arguments)

    return [
        ends("a reward that fails", {"at": "rewards", "do": "raise"}, "reward.on_failure=stop",
             "reward.retries=0"),
        ends("a reward process that dies", {"at": "rewards", "do": "os._exit"}),
        ends("an agent-loop process that dies", order("rollout", "DiffusionAgentLoopWorker", SIGKILL, 2)),
        ends("a mistake in the first update of a step", {"at": "update", "do": "raise"}),
        Fault(theme, "Ctrl-C with trainer.save_freq=0", order("update", "foreground", SIGINT),
              arguments=("trainer.save_freq=0",), says=("nothing was saved, as trainer.save_freq=0",), repeats=True),
    ]  # fmt: skip


def disks() -> list[Fault]:
    theme, size = "The disk is full", 64 * 2**20

    def fill(folder: Path) -> None:
        with contextlib.suppress(OSError), (folder / "run/ballast").open("wb", buffering=0) as ballast:
            while True:
                ballast.write(bytes(4096))

    return [
        Fault(theme, "before the run has written anything", given=fill, disk=size, says=("default_local_dir", "space")),
        Fault(theme, "when a checkpoint is due", {"at": "update", "after": 1, "do": "fill", "leave": 200_000},
              disk=size, says=("disk",)),
        Fault(theme, "while a checkpoint is written", {"at": "save", "after": 2, "do": "fill", "leave": 0}, disk=size),
        Fault(theme, "when metrics are written", {"at": "update", "after": 1, "do": "fill", "leave": 0}, disk=size),
    ]  # fmt: skip


def checkpoints() -> list[Fault]:
    theme, go_on = "The newest checkpoint is damaged", {"again": ("trainer.resume_mode=auto_previous",)}

    def damaged(pattern: str, change) -> dict:
        def given(folder: Path) -> None:
            shutil.copytree(interrupted(), folder / "run")
            change(min(p for p in (folder / "run/global_step_2").rglob(pattern) if p.is_file()))

        return {"given": given, "says": ("global_step_2",), "limit": 60, **go_on}

    def cut(path: Path) -> None:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)

    def empty(path: Path) -> None:
        path.write_bytes(b"")

    def pipe(path: Path) -> None:
        os.mkfifo(path.with_name("added.safetensors"))

    def broken_link(path: Path) -> None:
        path.with_name("added.safetensors").symlink_to("/no/such/file")

    def another_step(path: Path) -> None:
        path.write_text(path.read_text().replace('"global_step": 2', '"global_step": 1'))

    def nested(path: Path) -> None:
        path.write_text("[" * 100_000 + "]" * 100_000)

    def anonymous(path: Path) -> None:
        """Of no run, with a checksum that fits."""
        said = json.loads(path.read_text())
        del said["run"]
        path.write_text(json.dumps(said))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_name("manifest.sha256").write_text(f"{digest}  {path.name}\n")

    def hollow(folder: Path) -> None:
        shutil.copytree(interrupted(), folder / "run")
        (folder / "run/global_step_99").mkdir()

    return [
        Fault(theme, "weights are cut off", **damaged("state/*.safetensors", cut)),
        Fault(theme, "one bit of the weights is flipped", **damaged("state/*.safetensors", flip)),
        Fault(theme, "the weights are gone", **damaged("state/*.safetensors", Path.unlink)),
        Fault(theme, "its manifest is cut off", **damaged("manifest.json", cut)),
        Fault(theme, "a named pipe lies among the weights", **damaged("state/*.safetensors", pipe)),
        Fault(theme, "a broken link lies among the weights", **damaged("state/*.safetensors", broken_link)),
        Fault(theme, "one bit of its manifest is flipped", **damaged("manifest.json", flip)),
        Fault(theme, "its manifest is of another step", **damaged("manifest.json", another_step)),
        Fault(theme, "its manifest is nested 100,000 levels deep", **damaged("manifest.json", nested)),
        Fault(theme, "its manifest is of no run", **damaged("manifest.json", anonymous)),
        Fault(theme, "the trainer's state is empty", **damaged("trainer.*", empty)),
        Fault(theme, "an empty folder global_step_99", given=hollow, ends="succeeds", says=None),
    ]  # fmt: skip


SLOW_AGENTS = """
import sys, time

if any(part.endswith("dashboard/agent.py") for part in sys.orig_argv):
    time.sleep(20)
"""


def surroundings() -> list[Fault]:
    theme, hold = "Surroundings", {"at": "update", "after": 1, "do": "signal", "who": "none", "number": 0}

    def second(run: Run, folder: Path) -> Run:
        """A second command in the same folder while the first is in step 2, where it waits a while."""
        end = time.monotonic() + 200
        while not (folder / "done.json").exists() and time.monotonic() < end:
            time.sleep(0.1)
        elsewhere = folder / "second"
        elsewhere.mkdir()
        shutil.copy(folder / "moments.py", elsewhere)
        start = time.time()
        other = Run([a.replace("_dir=run", f"_dir={folder}/run") for a in command()], elsewhere)
        end_of(other)
        other.seconds = time.time() - start
        return other

    def slow_agents(folder: Path) -> None:
        """Ray's raylet gives up after 15 s."""
        (folder / "sitecustomize.py").write_text(SLOW_AGENTS)

    return [
        Fault(theme, "Ray's agents take 20 s to start", given=slow_agents, ends="succeeds", says=None),
        Fault(theme, "Ray's raylet is killed while it starts", outside=kill_when("raylet/raylet"), ends="succeeds",
              says=None),
        Fault(theme, "a second run in the same folder", hold | {"then_wait": 60}, outside=second, ends="succeeds",
              says=("run",)),
        Fault(theme, "ray.address does not answer", arguments=("ray.address=127.0.0.1:1",), says=("ray.address",),
              limit=60),
        Fault(theme, "RAY_ADDRESS names a cluster that is gone", env={"RAY_ADDRESS": "127.0.0.1:1"}, ends="succeeds",
              says=None),
        Fault(theme, "HOME is not set", env={"HOME": None}, ends="succeeds", says=None),
        Fault(theme, "HOME cannot be written", env={"HOME": "/proc/self"}, ends="succeeds", says=None),
        Fault(theme, "a temporary folder with a long name", env={"TMPDIR": "{f}/" + "long" * 30}, ends="succeeds",
              says=None),
    ]  # fmt: skip


CASES = [*killed(), *asked(), *processes_die(), *rewards(), *unsaved(), *disks(), *checkpoints(), *surroundings()]
