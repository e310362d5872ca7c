"""Where the device's time goes in an update alone: one more `update_actor` of a benchmark's work, under the profiler.

    python -m benchmarks.profile_update sd35m --images 44 --out outputs/update
    python -m benchmarks.profile_update tiny-sd3 --images 8 --out outputs/update     # on a CPU

Writes profile.txt (kinds of kernels, the longest, gaps) and a trace. Further arguments are overrides of the config.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.run import WORKS, settings
from benchmarks.side_by_side import NOBODY_ELSE, Turns


def profiled(
    work: str, images: int, out: Path, overrides: list[str], turns: Turns = NOBODY_ELSE
) -> dict[str, float]:
    """Seconds of the third step's stages, whose update is profiled: the first two compile, and fill the caches."""
    from verl_omni.perf.step_profile import StepProfile
    from verl_omni.testing.local_trainer import local_config, local_trainer

    with tempfile.TemporaryDirectory() as folder:
        given = [*settings(WORKS[work], images, Path(folder)), "trainer.total_training_steps=3", *overrides]
        with turns.together():
            trainer = local_trainer(local_config(given))
            pace, update = trainer.new_pace(), trainer.actor_wg.update_actor
            for _ in range(2):
                trainer.training_step(pace, {})
                trainer.global_step += 1

        def watched(batch):
            profile = StepProfile(trainer.actor_wg.engine.device)
            profile.start()
            answer = update(batch)
            profile.stop(out)
            return answer

        trainer.actor_wg.update_actor = watched
        timing: dict[str, float] = {}
        with turns.alone():
            trainer.training_step(pace, timing)
    print((out / "profile.txt").read_text())
    return {stage: round(value, 3) for stage, value in timing.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("--images", type=int, help="images a step; else the benchmark's own")
    parser.add_argument("--out", type=Path, required=True, help="folder for the profile")
    options, overrides = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print(profiled(options.work, options.images or WORKS[options.work].images, options.out, overrides))


if __name__ == "__main__":
    main()
