"""Where the device's time goes in a part of a step: an update, or what the VAE decodes, under the profiler.

    python -m benchmarks.profile_update sd35m --images 44 --out outputs/update
    python -m benchmarks.profile_update wan-1.3b --images 8 --part decode --out outputs/vae
    python -m benchmarks.profile_update tiny-sd3 --images 8 --out outputs/update     # on a CPU

Writes profile.txt (kinds of kernels, the longest, gaps) and a trace. Further arguments are overrides of the config.
"""

import argparse
import tempfile
from pathlib import Path

from benchmarks.run import WORKS, settings
from benchmarks.side_by_side import NOBODY_ELSE, Turns

PARTS = ("update", "decode")


def profiled(
    work: str, images: int, out: Path, overrides: list[str], turns: Turns = NOBODY_ELSE, part: str = "update"
) -> dict[str, float]:
    """Seconds of the third step's stages, of which a part is profiled: the first two compile, and fill the caches.

    Of several calls of the VAE it is the first.
    """
    from verl_omni.perf.step_profile import StepProfile
    from verl_omni.testing.local_trainer import local_config, local_trainer

    with tempfile.TemporaryDirectory() as folder:
        given = [*settings(WORKS[work], images, Path(folder)), "trainer.total_training_steps=3", *overrides]
        with turns.together():
            trainer = local_trainer(local_config(given))
            pace = trainer.new_pace()
            for _ in range(2):
                trainer.training_step(pace, {})
                trainer.global_step += 1

        group = trainer.actor_wg
        owner, name = (group, "update_actor") if part == "update" else (group.worker.rollout, "_decode")
        called = getattr(owner, name)

        def watched(*given):
            setattr(owner, name, called)
            profile = StepProfile(group.engine.device)
            profile.start()
            answer = called(*given)
            profile.stop(out)
            return answer

        setattr(owner, name, watched)
        timing: dict[str, float] = {}
        with turns.alone():
            trainer.training_step(pace, timing)
    print((out / "profile.txt").read_text())
    return {stage: round(value, 3) for stage, value in timing.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("--images", type=int, help="images a step; else the benchmark's own")
    parser.add_argument("--part", choices=PARTS, default="update", help="what is profiled (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the profile")
    options, overrides = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    images = options.images or WORKS[options.work].images
    print(profiled(options.work, images, options.out, overrides, part=options.part))


if __name__ == "__main__":
    main()
