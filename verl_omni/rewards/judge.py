"""A judge of its own for a run: servers of a vision-language model beside the training."""

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from verl_omni.config.schema import RewardModelConfig
from verl_omni.rewards.choice import Choice
from verl_omni.utils.errors import RunError
from verl_omni.utils.hub import fetch_weights, model_folder, named

JUDGE = "judge"  # what its servers are called where devices are dealt out
MOST_RESTARTS = 3  # of a server that dies; then the rewards fail, with the reason that its clients see
LOG = "reward_model_{number}.log"
# Reads the number of the group to end when nobody is left who could write another. It is nobody's child: Ray ends the
# children of a process that it kills, at once and without their own.
KEEPER = """
import os, signal, sys, time
if os.fork():
    os._exit(0)
os.setsid()
group = 0
for line in sys.stdin:
    group = int(line)
try:
    for _ in range(50 if group else 0):
        os.killpg(group, 0)
        time.sleep(0.1)
    if group:
        os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


# Becomes the server. Linux ends it with the process that started it, however that ends. A process that has many threads
# and libraries must not run anything in a fork of its own for this.
TIED = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class JudgeServer:
    """One server process: started, watched, started again on the same port where it dies, and ended with its run."""

    def __init__(self, command: str, model: str, gpus: int, log: str):
        self.log, self.stopping, self.restarts = Path(log).expanduser(), False, 0
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        host = ray.util.get_node_ip_address()
        self.address = f"http://{host}:{port}/v1"
        self.environment = os.environ | self._from_hub(command, model)
        known = {"{model}": model.partition("@")[0], "{host}": host, "{port}": str(port), "{gpus}": str(max(gpus, 1))}
        self.command = [_filled(part, known) for part in shlex.split(command)]
        self.process: subprocess.Popen | None = None
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        keeper = subprocess.Popen([sys.executable, "-S", "-E", "-c", KEEPER], stdin=subprocess.PIPE, text=True, **quiet)
        if keeper.wait():  # what stays is the child that it has left behind
            raise RunError("the reward model's server: no process could be started that would end it with the run")
        self.keeper = keeper.stdin

    @staticmethod
    def _from_hub(command: str, model: str) -> dict[str, str]:
        """A name stays a name, by which requests ask for it; what it stands for is in this machine's cache."""
        if named(model) is None:
            return {}
        fetch_weights(model_folder(model, weights=False, setting="reward.reward_model.model_path"))
        return {} if "trust" in command else {"HF_HUB_OFFLINE": "1"}

    def start(self, seconds: float) -> str:
        """Its address, once it answers; raises with the last lines of its log where it does not."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._launch()
        end, health = time.monotonic() + seconds, self.address.removesuffix("/v1") + "/health"
        while not _answers(health):
            if self.process.poll() is not None:
                raise RunError(f"{self._named()} ended with {self.process.returncode}: {self._last_words()}")
            if time.monotonic() > end:
                self.stop()
                raise RunError(
                    f"{self._named()} gave no answer within reward.reward_model.start_timeout={seconds:g} s: "
                    f"{self._last_words()}"
                )
            time.sleep(0.5)
        threading.Thread(target=self._watch, daemon=True).start()
        return self.address

    def _launch(self) -> None:
        if shutil.which(self.command[0], path=self.environment.get("PATH")) is None:
            raise RunError(
                f"{self._named()} cannot be started: No such file or directory: {self.command[0]}. Install it, or set "
                "reward.reward_model.command"
            )
        with self.log.open("a") as log:
            # Tied to this process: it must not outlive the run. Its own processes are of one group with it.
            tied = [sys.executable, "-S", "-E", "-c", TIED, *self.command]
            self.process = subprocess.Popen(tied, stdout=log, stderr=log, env=self.environment, process_group=0)
        self._to_end(self.process.pid)

    def _watch(self) -> None:
        while True:
            self.process.wait()
            self._end_what_it_started()
            if self.stopping or self.restarts >= MOST_RESTARTS:
                return
            self.restarts += 1
            print(f"{self._named()} ended with {self.process.returncode} and is started again", flush=True)
            self._launch()

    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        self.stopping = True
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._end_what_it_started()

    def _end_what_it_started(self) -> None:
        """The engine of a server that was killed would keep the port, or the GPU's memory, from the next one."""
        with contextlib.suppress(ProcessLookupError):  # there is nobody left
            os.killpg(self.process.pid, signal.SIGKILL)
        self._to_end(0)

    def _to_end(self, group: int) -> None:
        """With this process, however that ends; 0 is none."""
        try:
            print(group, file=self.keeper, flush=True)
        except BrokenPipeError:  # somebody has killed it
            print(f"{self._named()} may outlive the run, whose watch over it is gone: end it by hand", flush=True)

    def _named(self) -> str:
        return f"the reward model's server ({' '.join(self.command)})"

    def _last_words(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"{lines[-1][:300] if lines else 'it said nothing'} (all of it: {self.log})"


def _filled(text: str, known: Mapping[str, str]) -> str:
    """Not `format`: a command may have braces of its own, such as JSON."""
    for name, value in known.items():
        text = text.replace(name, value)
    return text


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def start_judges(
    config: RewardModelConfig, run_dir: str, places: list[dict[str, Any]], patience: float
) -> tuple[list[Any], str]:
    """(the servers, one in each of these places; their addresses, separated by commas).

    Ray may take `patience` seconds more for their processes than they themselves may take for their answer.
    """
    server = ray.remote(JudgeServer)
    log = os.path.join(os.path.abspath(os.path.expanduser(run_dir)), LOG)
    servers = [
        server.options(**place).remote(config.command, config.model_path, config.n_gpus_per_node, log.format(number=i))
        for i, place in enumerate(places)
    ]
    starting = [server.start.remote(config.start_timeout) for server in servers]
    try:
        return servers, ",".join(ray.get(starting, timeout=config.start_timeout + patience))
    except ray.exceptions.GetTimeoutError as error:
        late = [i for i, start in enumerate(starting) if not ray.wait([start], timeout=0)[0]]
        raise RunError(
            f"Ray has started no process for judge {', '.join(map(str, late))} of {len(servers)} within "
            f"{config.start_timeout + patience:g} s (reward.reward_model.start_timeout and ray.placement_timeout): "
            "look at `ray status`"
        ) from error


def with_judge(choices: Mapping[str, Choice], address: str, model: str) -> dict[str, Choice]:
    """Where a `vlm_judge` names no server, it is the run's own."""
    return {
        label: replace(choice, settings={"address": address, "model": model.partition("@")[0], **choice.settings})
        if choice.name == "vlm_judge" and "address" not in choice.settings
        else choice
        for label, choice in choices.items()
    }
