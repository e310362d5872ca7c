"""Does a long run grow? Many short steps of a tiny model through the real command, and what its processes hold.

    python -m benchmarks.soak fully_async --at 100 1000     # two rollout servers, HTTP, a reward server
    python -m benchmarks.soak colocated --at 100 1000       # with a checkpoint every ten steps
    python -m benchmarks.soak --write docs/reliability.md   # what was found so far, as tables

Memory is what a process has for itself plus its share of what it has in common with others (PSS); threads and open
files are counted, while the run goes on: it has some steps more. Results are kept in outputs/soak.
"""

import argparse
import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import defaultdict
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from verl_omni.report.document_tables import fill
from verl_omni.testing.tiny_random import build_tiny_random

RESULTS = Path("outputs/soak")
MIB = 2**20
MORE = 40  # steps after the last one that is looked at: its processes are still there
ASK_EVERY = 5  # seconds between two people who look at the policy
SMALL = [
    "data.val_files=null",
    "data.train_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.pipeline.height=32",
    "actor_rollout_ref.rollout.pipeline.width=32",
    "actor_rollout_ref.rollout.pipeline.num_inference_steps=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.model.lora_rank=4",
    "trainer.logger=[jsonl]",
    "trainer.resume_mode=disable",
]
MODES = {
    "fully_async": [
        "trainer.mode=fully_async",
        "rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.http.port=0",
        "trainer.save_freq=0",
    ],
    "colocated": ["trainer.save_freq=10", "trainer.max_ckpt_to_keep=2"],
}


class RewardServer:
    """`verl-omni serve-reward` beside the run."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "verl_omni.cli.main", "serve-reward", "jpeg_compressibility", "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if line.startswith("serving"):
                self.address = line.split()[-1]
                break
        else:
            sys.exit("error: the reward server did not start")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()  # whatever else it says

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


class Visitor(threading.Thread):
    """Asks the rollout servers for an image now and then, over HTTP."""

    def __init__(self, log: Path):
        super().__init__(daemon=True)
        self.log, self.answered, self.refused, self.over = log, 0, [], threading.Event()

    def run(self) -> None:
        while not self.over.wait(ASK_EVERY):
            for address in re.findall(r"http://[\w.:]+", self.log.read_text()):
                body = json.dumps({"prompt": "a lighthouse", "seed": self.answered}).encode()
                request = urllib.request.Request(
                    f"{address}/v1/images/generations", body, {"Content-Type": "application/json"}
                )
                try:
                    with urllib.request.urlopen(request, timeout=60) as answer:
                        (image,) = json.load(answer)["data"]
                    assert base64.b64decode(image["b64_json"]).startswith(b"\x89PNG")
                    self.answered += 1
                except OSError as error:  # the run has just ended, or a server is not there yet
                    self.refused.append(str(error))


def prepare(folder: Path) -> list[str]:
    """A tiny model and eight prompts."""
    rows = [
        {
            "data_source": "jpeg_compressibility",
            "prompt": [{"role": "user", "content": f"a lighthouse with the number {i}"}],
            "reward_model": {"style": "rule", "ground_truth": str(i)},
        }
        for i in range(8)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    model = build_tiny_random("StableDiffusion3Pipeline", folder / "model")
    return [f"actor_rollout_ref.model.path={model}", f"data.train_files={folder / 'prompts.parquet'}"]


def what_it_is(process: psutil.Process) -> str:
    """A process as people call it: Ray gives its workers a title."""
    words = process.cmdline() or [process.name()]
    title = re.match(r"ray::(\w+)", words[0])
    if title:
        return {"IDLE": "Ray: idle workers", "DashboardAgent": "Ray: agent", "RuntimeEnvAgent": "Ray: runtime env"}.get(
            title[1], title[1]
        )
    if "serve-reward" in words:
        return "reward server"
    if "verl_omni.trainer.main_diffusion" in words:
        return "command and driver"
    script = next((Path(word).stem for word in words if word.endswith(".py")), Path(words[0]).name)
    return f"Ray: {script}" if "/ray/" in " ".join(words[:3]) else script


def look(roots: list[psutil.Process]) -> dict[str, list[dict[str, float]]]:
    """Kind -> memory in MiB, threads and open files of each of its processes."""
    found = defaultdict(list)
    for process in (one for root in roots for one in (root, *root.children(recursive=True))):
        try:
            with process.oneshot():
                memory = process.memory_full_info()
                found[what_it_is(process)].append(
                    {
                        "pid": process.pid,
                        "pss": memory.pss / MIB,
                        "rss": memory.rss / MIB,
                        "threads": process.num_threads(),
                        "files": process.num_fds(),
                    }
                )
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it ended meanwhile
    return dict(found)


def steps_done(metrics: Path) -> int:
    """The last step of a file that is being written."""
    if not metrics.is_file():
        return 0
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - 65536))
        found = re.findall(rb'"training/global_step": *(\d+)', file.read())
    return int(found[-1]) if found else 0


def soak(mode: str, at: list[int], out: Path) -> dict:
    """One run, looked at when it has done so many steps."""
    folder, steps = out / mode, max(at) + MORE
    metrics, log = folder / "run/metrics.jsonl", folder / "log.txt"
    settings = [*prepare(folder), *SMALL, *MODES[mode], f"trainer.total_training_steps={steps}"]
    settings.append(f"trainer.default_local_dir={folder}/run")
    server = RewardServer() if mode == "fully_async" else None
    if server is not None:
        settings.append(f'reward.scorers=[{{name: http, address: "{server.address}", scorer: jpeg_compressibility}}]')
    metrics.unlink(missing_ok=True)
    seen, clock, began = {}, {}, time.monotonic()
    with log.open("w") as said:
        run = subprocess.Popen(
            [sys.executable, "-m", "verl_omni.trainer.main_diffusion", *settings],
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    visitor = Visitor(log)
    visitor.start()
    roots = [psutil.Process(p.pid) for p in (run, server and server.process) if p]
    try:
        waiting = sorted(at)
        while run.poll() is None:
            done = steps_done(metrics)
            if done and "first" not in clock:
                clock["first"] = (done, time.monotonic())
            if waiting and done >= waiting[0]:
                waiting = [step for step in waiting if step > done]
                seen[done] = look(roots)
                clock["last"] = (done, time.monotonic())
                print(f"{mode}: step {done} after {time.monotonic() - began:.0f} s", flush=True)
            time.sleep(0.05)
    finally:
        visitor.over.set()
        if run.poll() is None:
            run.terminate()
            run.wait()
        if server is not None:
            server.stop()
    if run.returncode:
        sys.exit(f"error: the run ended with {run.returncode}: {log.read_text().splitlines()[-1]}")
    (first, start), (last, end) = clock["first"], clock["last"]
    return {
        "mode": mode,
        "steps": steps,
        "seconds_per_step": (end - start) / max(1, last - first),
        "images_over_http": visitor.answered,
        "refused_over_http": len(visitor.refused),
        "cores": os.cpu_count(),
        "seen": seen,
    }


def table(found: dict) -> str:
    """Each kind of process at the first and the last step that was looked at: sums over its processes."""
    first, last = (str(step) for step in sorted(map(int, found["seen"]))[:: max(1, len(found["seen"]) - 1)])
    head = [f"memory, MiB, at step {first}", f"at {last}", f"threads at {first}", f"at {last}", f"files at {first}"]
    rows = [f"| process | how many | {' | '.join([*head, f'at {last}'])} |", "|---|" + "---:|" * 7]
    before, after = found["seen"][first], found["seen"][last]
    for kind in sorted(before.keys() | after.keys()):
        cells = [str(len(after.get(kind, []))) if len(before.get(kind, [])) == len(after.get(kind, [])) else
                 f"{len(before.get(kind, []))}, {len(after.get(kind, []))}"]  # fmt: skip
        for what in ("pss", "threads", "files"):
            cells += [f"{sum(one[what] for one in those.get(kind, [])):,.0f}" for those in (before, after)]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    asked = f", {found['images_over_http']:,} images asked for over HTTP" if found["images_over_http"] else ""
    return (
        f"`{found['mode']}`, {found['steps']:,} steps of {found['seconds_per_step']:.2f} s on {found['cores']} cores"
        f"{asked}:\n\n" + "\n".join(rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", choices=MODES, help="what to run")
    parser.add_argument("--at", type=int, nargs="+", default=[100, 1000], help="steps to look at (100 1000)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="%(default)s")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill its <!-- SOAK --> from the results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    if options.mode:
        found = soak(options.mode, options.at, options.out.absolute())
        result = options.out / f"{options.mode}.json"
        result.write_text(json.dumps(found, indent=1))
        print(table(json.loads(result.read_text())))
    if options.write:
        results = [json.loads((options.out / f"{mode}.json").read_text()) for mode in MODES]
        options.write.write_text(fill(options.write.read_text(), "SOAK", "\n\n".join(map(table, results))))


if __name__ == "__main__":
    main()
