"""Offline DPO on the quickstart's task: does training on cached pairs win over the model that drew them?

    python -m benchmarks.offline_dpo --out outputs/offline_dpo [--seed 0]

The quickstart's checkpoint draws each training number four times; the OCR's best and worst reading make a pair. After
training, both models draw the held-out numbers from the same noise, and the OCR says whose sign it reads better.
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

DRAWS = 4  # for each training number; the best and the worst are kept
ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def write_pairs(out: Path, numbers: list[str], seed: int) -> Path:
    """Best and worst of `DRAWS` images for each number, as PNG files and `metadata.jsonl`; no pair of equal scores."""
    from PIL import Image

    from verl_omni.quickstart.checkpoint import draw, load_pipeline
    from verl_omni.quickstart.task import CHECKPOINT, prompt_for
    from verl_omni.rewards.scorers.ocr import compute_score_ocr_line

    out.mkdir(parents=True, exist_ok=True)
    pipeline, rows = load_pipeline(CHECKPOINT), []
    for start in tqdm(range(0, len(numbers), 50), desc="pairs", unit="50 numbers"):
        part = numbers[start : start + 50]
        draws = [draw(pipeline, part, seed=seed * 1_000_000 + start * DRAWS + i) for i in range(DRAWS)]
        scores = [[reading["score"] for reading in compute_score_ocr_line(list(images), part)] for images in draws]
        for i, number in enumerate(part):
            ranked = sorted(range(DRAWS), key=lambda d, i=i: scores[d][i])
            worst, best = ranked[0], ranked[-1]
            if scores[best][i] == scores[worst][i]:
                continue
            row = {"prompt": prompt_for(number)}
            for name, which in (("chosen", best), ("rejected", worst)):
                pixels = (draws[which][i] * 255).round().byte().permute(1, 2, 0).cpu().numpy()
                Image.fromarray(pixels).save(out / f"{number}_{name}.png")
                row |= {name: f"{number}_{name}.png", f"{name}_score": scores[which][i]}
            rows.append(row)
    (out / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return out


def train(cache: Path, run_dir: Path, steps: int, seed: int) -> Path:
    """The real command; returns the trained transformer's folder."""
    from verl_omni.quickstart.__main__ import RECIPE
    from verl_omni.quickstart.task import CHECKPOINT

    seeds = ("trainer.seed", "data.seed", f"{ACTOR}.engine.seed")
    command = [
        sys.executable, "-m", "verl_omni.trainer.main_diffusion",
        "--config-dir", str(RECIPE), "--config-name", "quickstart",
        f"actor_rollout_ref.model.path={CHECKPOINT}",
        "actor_rollout_ref.model.algorithm=dpo",
        "algorithm.sample_source=offline",
        "algorithm.timesteps_per_sample=3",
        f"{ROLLOUT}.algo.sde_type=null", f"{ROLLOUT}.algo.noise_level=null",
        f"data.train_files={cache}",
        "data.train_batch_size=48",
        f"{ACTOR}.ppo_mini_batch_size=24",
        f"{ACTOR}.optim.lr=1e-4",
        f"{ACTOR}.diffusion_loss.extra.beta=200",  # at the usual 2000 a model this small is sure of itself at once
        *(f"{name}={seed}" for name in seeds),
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=0", "trainer.save_freq=-1",
        f"trainer.default_local_dir={run_dir}",
    ]  # fmt: skip
    if subprocess.run(command).returncode:
        sys.exit(f"error: the run in {run_dir} failed")
    return run_dir / f"global_step_{steps}" / "export" / "transformer"


def compare(transformer: Path, seeds: range) -> str:
    """Wins, draws and losses of the trained model against the one it started from, on the held-out numbers."""
    from diffusers import QwenImageTransformer2DModel

    from verl_omni.quickstart.checkpoint import draw, load_pipeline
    from verl_omni.quickstart.task import CHECKPOINT, split_numbers
    from verl_omni.rewards.scorers.ocr import compute_score_ocr_line

    _, held_out = split_numbers()
    trained = QwenImageTransformer2DModel.from_pretrained(transformer)
    scores = {}
    for name, pipeline in (
        ("before", load_pipeline(CHECKPOINT)),
        ("after", load_pipeline(CHECKPOINT, transformer=trained)),
    ):
        images = itertools.chain.from_iterable(draw(pipeline, held_out, seed) for seed in seeds)
        scores[name] = [r["score"] for r in compute_score_ocr_line(list(images), held_out * len(seeds))]
    pairs = list(zip(scores["before"], scores["after"], strict=True))
    wins, losses = sum(a > b for b, a in pairs), sum(a < b for b, a in pairs)
    draws = len(pairs) - wins - losses
    before, after = (sum(values) / len(values) for values in scores.values())
    return f"| {before:.3f} | {after:.3f} | {wins} | {draws} | {losses} | {(wins + draws / 2) / len(pairs):.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pairs, their cache and the run")
    parser.add_argument("--numbers", type=int, default=400, help="training numbers that are drawn (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="training steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    from verl_omni.data.prepare_offline_dpo import prepare
    from verl_omni.quickstart.task import CHECKPOINT, HEIGHT, WIDTH, split_numbers

    train_numbers, _ = split_numbers()
    pairs = options.out / "pairs"
    if not (pairs / "metadata.jsonl").is_file():
        write_pairs(pairs, train_numbers[: options.numbers], options.seed)
    cache = prepare(CHECKPOINT, pairs, options.out / "cache", HEIGHT, WIDTH)
    transformer = train(cache, options.out / f"run_{options.seed}", options.steps, options.seed)
    print("| score before | after | wins | draws | losses | win rate |\n|---|---|---|---|---|---|")
    print(compare(transformer, range(100, 103)))


if __name__ == "__main__":
    main()
