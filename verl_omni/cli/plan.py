"""How many devices for training and how many for rollout? From what a run has measured.

    verl-omni plan RUN_FOLDER --devices 8
"""

import argparse
import sys

from verl_omni.perf import plan


def main() -> None:
    parser = argparse.ArgumentParser(
        "verl-omni plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="the folder of a run of a few steps, in any mode")
    parser.add_argument("--devices", type=int, help="how many there are to share out; by default, those of the run")
    options = parser.parse_args()
    try:
        work = plan.read_work(options.run)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    devices = options.devices or work.training + work.rollout
    if devices < 1:
        sys.exit(f"error: --devices={devices}: expected 1 or more")
    took = f"with {work.training} training" + (f" and {work.rollout} rollout" if work.rollout else "")
    print(f"Measured: {work.step:.2f} s a step, {work.mode} {took} devices, of which drawing is {work.drawing:.2f} and")
    print(f"learning {work.learning:.2f} device-seconds. If both scale with their devices, {devices} of them take:\n")
    print(plan.table(work, devices))


if __name__ == "__main__":
    main()
