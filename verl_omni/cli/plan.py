"""Will a run fit, how long will a step take, and how should devices be shared out?

    verl-omni plan [RECIPE] [key=value ...] [--gpus 8] [--memory 80] [--gpu h100]
    verl-omni plan RUN_FOLDER [--devices 8]

With the arguments of `train`: peak memory of each stage on a device, seconds of a step, what to change where it does
not fit, and the ways to use so many GPUs, the best one marked. It reads the configs of the model's folder, not its
weights, and needs no GPU. With the folder of a run of a few steps: how many devices should train and how many draw,
from its times.
"""

import argparse
import gc
import os
import sys
from typing import TYPE_CHECKING

import verl_omni
from verl_omni.perf import plan
from verl_omni.utils.options import Parser, above_zero, at_least

if TYPE_CHECKING:
    from omegaconf import DictConfig


OWN = ("--gpus", "--memory", "--gpu", "--devices")
WAITED_FOR = "building the model without its weights and running a few of its blocks, unless it is known from before"


def main() -> None:
    parser = Parser(
        "verl-omni plan",
        usage="verl-omni plan [RECIPE] [key=value ...] [--gpus N] [--memory GIB] [--gpu NAME]\n"
        "       verl-omni plan RUN_FOLDER [--devices N]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=at_least(1), help="in all, rollout servers' too; by default the run's")
    parser.add_argument("--memory", type=above_zero, help="GiB of each; by default what such a GPU has")
    parser.add_argument("--gpu", default="h200", help="which: h200, h100, h800, a100, a800, l40s, b200 (%(default)s)")
    parser.add_argument("--devices", type=at_least(1), help="with a run folder: to share out; by default the run's")
    options, given = parser.parse_known_args()
    if is_run(given):
        of_run(given[0], options.devices)
        return
    if options.devices is not None:
        sys.exit("error: --devices is for the folder of a run; with the arguments of train it is --gpus")
    sys.argv[1:] = given
    from verl_omni.cli.train import with_configuration

    with_configuration(lambda config: of_settings(config, options.gpus, options.memory, options.gpu), OWN)


def is_run(given: list[str]) -> bool:
    """One word that is no recipe."""
    if len(given) != 1 or "=" in given[0] or given[0].startswith("-"):
        return False
    from verl_omni.cli.recipes import shipped

    return os.path.isdir(given[0]) or not (given[0] in shipped() or given[0].endswith((".yaml", ".yml")))


def of_settings(config: "DictConfig", gpus: int | None, memory: float | None, gpu: str) -> None:
    from verl_omni.cli.in_process import mistakes_in_one_line

    with mistakes_in_one_line():
        for name, value in (("gpus", gpus), ("memory", memory)):
            if value is not None and value <= 0:
                raise ValueError(f"--{name}={value}: expected more than 0")
        print(f"verl-omni {verl_omni.__version__}: {WAITED_FOR}", file=sys.stderr)
        gc.disable()  # what imports make is not garbage: to look for some takes a fifth of their time
        from verl_omni.trainer.forecast.forecast import forecast
        from verl_omni.trainer.forecast.tables import lines

        gc.freeze()
        gc.enable()
        for line in lines(forecast(config, gpus, memory, gpu, remember=True)):
            print(line, flush=True)


def of_run(run: str, devices: int | None) -> None:
    try:
        work = plan.read_work(run)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    devices = devices or work.training + work.rollout
    if devices < 1:
        sys.exit(f"error: --devices={devices}: expected 1 or more")
    took = f"with {work.training} training" + (f" and {work.rollout} rollout" if work.rollout else "")
    print(f"Measured: {work.step:.2f} s a step, {work.mode} {took} devices, of which drawing is {work.drawing:.2f} and")
    print(f"learning {work.learning:.2f} device-seconds. If both scale with their devices, {devices} of them take:\n")
    print(plan.table(work, devices))


if __name__ == "__main__":
    main()
