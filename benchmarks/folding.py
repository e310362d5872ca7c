"""What is lost where LoRA is folded into bfloat16 weights for the rollout: rounded to the nearest, by chance, or with
a gain, as `verl_omni.workers.engine.lora` does it.

    python -m benchmarks.folding layer                                   # seconds
    python -m benchmarks.folding runs --out outputs/folding --lr 1e-5    # the quickstart's task, four runs

`layer`: one layer of SD3.5-medium's width, with adapters that learn to imitate another. What arrives of the adapter's
product (its projection on what it should be); how far the output is off for inputs that the adapter answers to most, as
a share of its effect; and for any input, beside the rounding of the output itself. `runs`: how far ratios of training
to rollout are from 1 on average before an update, over all steps, and the held-out score at the end. Prints tables in
Markdown.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

from verl_omni.workers.engine import lora

STEPS = (1, 5, 20)
WIDTH, RANK, ALPHA = 1536, 32, 64


def nearest(frozen: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    return (frozen + product).to(frozen.dtype)


def by_chance(frozen: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """Up or down with a probability that is right on average: stochastic rounding, of the lower half of a float32."""
    bits = (frozen + product).view(torch.int32)
    return (bits + torch.randint_like(bits, 2**16)).bitwise_and(-(2**16)).view(torch.float32).to(frozen.dtype)


def products(lr: float) -> Iterator[tuple[int, torch.Tensor]]:
    """(step, scaling * B A) as an adapter learns to imitate a change of the layer."""
    torch.manual_seed(1)
    a = torch.nn.Parameter((torch.rand(RANK, WIDTH) * 2 - 1) / WIDTH**0.5)
    b = torch.nn.Parameter(torch.zeros(WIDTH, RANK))
    wanted = torch.randn(WIDTH, 8) @ torch.randn(8, WIDTH) * 1e-3
    optimizer = torch.optim.AdamW([a, b], lr=lr, weight_decay=1e-4)
    for step in range(1, max(STEPS) + 1):
        x = torch.randn(64, WIDTH)
        loss = (x @ a.T @ b.T * (ALPHA / RANK) - x @ wanted.T).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in STEPS:
            yield step, (b @ a).detach() * (ALPHA / RANK)


def layer(rates: list[float]) -> str:
    torch.manual_seed(0)
    frozen = (torch.randn(WIDTH, WIDTH) * 0.02).bfloat16()
    x = torch.randn(WIDTH, 256)
    output = frozen.float() @ x
    rounding = (output.bfloat16() - output).norm()
    ways = {"nearest": nearest, "by chance": by_chance, "with a gain": lora.folded}
    lines = [
        "| learning rate | steps | rounded | arrives | along the adapter | any output |",
        "|---|---|---|---|---|---|",
    ]
    for lr in rates:
        for step, product in products(lr):
            along = torch.svd_lowrank(product, 8)[2] @ torch.randn(8, 256)
            for name, fold in ways.items():
                change = fold(frozen, product.clone()).float() - frozen.float()
                arrives = (change * product).sum() / product.square().sum()
                off = ((change - product) @ along).norm() / (product @ along).norm()
                everywhere = ((change - product) @ x).norm() / rounding
                lines.append(f"| {lr:g} | {step} | {name} | {arrives:.0%} | {off:.0%} | {everywhere:.2f} |")
    return "\n".join(lines)


def run(out: Path, way: str, lr: float, steps: int, seed: int) -> Path:
    """The quickstart with LoRA in bfloat16, in this process; its folder."""
    from benchmarks.staleness import quickstart_settings
    from verl_omni.testing.local_trainer import local_config, local_trainer

    folder, own = out / f"{way}_{lr:g}_{seed}_{steps}".replace(" ", "_"), lora.folded
    if (folder / "report.html").exists():
        return folder
    given = [
        *quickstart_settings(out),
        *(f"trainer.{one}" for one in (f"default_local_dir={folder}", f"total_training_steps={steps}", f"seed={seed}")),
        *(f"trainer.{one}" for one in (f"test_freq={steps}", "save_freq=0", "resume_mode=disable")),
        *(f"{one}.seed={seed}" for one in ("data", "actor_rollout_ref.rollout")),
        *(f"actor_rollout_ref.model.lora_{one}" for one in (f"rank={RANK}", f"alpha={ALPHA}")),
        f"actor_rollout_ref.actor.optim.lr={lr:g}",
        "actor_rollout_ref.actor.engine.dtype=bfloat16",
        f"actor_rollout_ref.actor.engine.fold_lora={str(way != 'not folded').lower()}",
    ]
    lora.folded = {"nearest": nearest, "by chance": by_chance}.get(way, own)
    try:
        local_trainer(local_config(given)).fit()
    finally:
        lora.folded = own
    return folder


def runs(options: argparse.Namespace) -> str:
    from benchmarks.staleness import SCORE
    from verl_omni.quickstart.data import write_data

    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out)
    lines = ["| learning rate | rollout | mean ratio off by | held-out score |", "|---|---|---|---|"]
    for lr in options.lr:
        for way in options.way:
            folders = [run(options.out, way, lr, options.steps, seed) for seed in range(options.seeds)]
            found = [[json.loads(line)["data"] for line in (f / "metrics.jsonl").open()] for f in folders]
            off = [row["actor/rollout_ratio_mean_dev"] for rows in found for row in rows if "actor/grad_norm" in row]
            scores = [rows[-1][SCORE] for rows in found]
            shown = " ".join(f"{score:.3f}" for score in scores)
            lines.append(f"| {lr:g} | {way} | {statistics.mean(off):.2e} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layer", "runs"))
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-4], help="learning rates (1e-5 1e-4)")
    parser.add_argument("--out", type=Path, default=Path("outputs/folding"), help="folder of the runs (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="training steps of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each kind (%(default)s)")
    ways = ("not folded", "nearest", "by chance", "with a gain")
    parser.add_argument("--way", nargs="+", choices=ways, default=ways, help="ways to fold (all)")
    options = parser.parse_args()
    print(layer(options.lr) if options.what == "layer" else runs(options))


if __name__ == "__main__":
    main()
