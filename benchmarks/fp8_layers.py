"""Which layers are worth 8 bits: seconds of compiled blocks of SD3.5-medium, with different layers in 8 bits.

    python -m benchmarks.fp8_layers --out outputs/fp8_layers            # needs a GPU: some 60 s
    python -m benchmarks.fp8_layers --out outputs/fp8_layers --small    # the same calls on a CPU

Where torchao is installed (pip install torchao), one line more has all of them in its layers, in place of ours.

Forwards of 22 rows without a gradient, as in a rollout of 512 x 512 with 205 tokens of text. Two blocks with a second
attention and two without stand for the model's 13 and 11. The last line is the fastest list, as a setting of a run.
"""

import argparse
import functools
from pathlib import Path
from typing import Any

from benchmarks import find_torchao
from benchmarks.models import SD35_MEDIUM
from benchmarks.side_by_side import Setting, Turns, run_all
from benchmarks.sweep import import_everything

DUAL, SINGLE = 13, 11  # blocks of the model, with a second attention and without
FOUR = {"num_layers": 5, "dual_attention_layers": [0, 1]}  # the last one leaves the text out: it is not counted
TINY = {"num_attention_heads": 2, "caption_projection_dim": 128, "joint_attention_dim": 64, "pooled_projection_dim": 32}
MLP = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]
QKV = ["to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"]
OUT = ["to_out.0", "to_add_out"]
LISTS: dict[str, list[str]] = {
    "none": [],
    "all": [*QKV, *OUT, *MLP],
    "all but the output projections": [*QKV, *MLP],
    "the MLPs": MLP,
    "the first of the MLPs": [name for name in MLP if name.endswith("proj")],
    "the first of the MLPs, and q, k, v": [*QKV, *(name for name in MLP if name.endswith("proj"))],
}
RATE = "model ms"


def measure(modules: list[str], small: bool, torchao: bool, turns: Turns) -> dict[str, Any]:
    """Milliseconds of each of the blocks, and of the model's 24 by that."""
    import contextlib

    import torch
    from diffusers import SD3Transformer2DModel

    from benchmarks.fp8 import with_torchao
    from benchmarks.timing import seconds
    from verl_omni.workers.engine.compile.blocks import compile_blocks, repeated_blocks
    from verl_omni.workers.engine.compile.fused_gelu import fuse_gelu
    from verl_omni.workers.engine.fp8 import Fp8Layers, chosen_layers

    device, dtype = ("cpu", torch.float32) if small else ("cuda", torch.bfloat16)
    rows, side = (2, 8) if small else (22, 64)
    config = SD35_MEDIUM | FOUR | (TINY if small else {})
    torch.manual_seed(0)
    with turns.together():
        with torch.device(device):
            transformer = SD3Transformer2DModel.from_config(config).to(dtype).eval().requires_grad_(False)
        blocks = repeated_blocks(transformer)
        calls: list[tuple] = []
        heard = lambda _, args, kwargs: calls.append((args, kwargs))  # noqa: E731
        hooks = [block.register_forward_pre_hook(heard, with_kwargs=True) for block in blocks]
        with torch.no_grad():
            transformer(
                hidden_states=torch.randn(rows, 16, side, side, device=device, dtype=dtype),
                encoder_hidden_states=torch.randn(rows, 205, config["joint_attention_dim"], device=device, dtype=dtype),
                pooled_projections=torch.randn(rows, config["pooled_projection_dim"], device=device, dtype=dtype),
                timestep=torch.full((rows,), 500.0, device=device),
            )
        for hook in hooks:
            hook.remove()
        if not small:
            if not torchao:  # whose layers are not what it multiplies
                fuse_gelu(transformer)
            compile_blocks({"transformer": transformer})
        if torchao:
            chosen = [one for block in repeated_blocks(transformer) for one, _ in chosen_layers(block, modules)]
            with_torchao(transformer, lambda module, _: module in chosen)
        own = modules and not torchao
        layers = Fp8Layers([transformer], modules, torch.device(device), dtype) if own else None
        if layers:
            layers.hold(fold=False)

        def forward(which: int) -> None:
            with torch.no_grad(), layers.active() if layers else contextlib.nullcontext():
                blocks[which](*calls[which][0], **calls[which][1])

        for which in (1, 3):
            for _ in range(2):
                forward(which)
    with turns.alone():
        times = 3 if small else 60
        dual, single = (1e3 * seconds(functools.partial(forward, which), device, times) for which in (1, 3))
    return {"with a second attention, ms": dual, "without, ms": single, RATE: DUAL * dual + SINGLE * single}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and logs")
    parser.add_argument("--small", action="store_true", help="a tiny model, on a CPU")
    options = parser.parse_args()
    import_everything()
    settings = [Setting(name, 16.0, measure, (modules, options.small, False)) for name, modules in LISTS.items()]
    if options.small or not find_torchao():
        print("torchao computes on a GPU only" if options.small else "torchao is not installed", "and is not compared")
    else:
        settings.append(Setting("all, by torchao", 16.0, measure, (LISTS["all"], False, True)))
    found = run_all(settings, options.out, 120.0, 300.0, at_once=6)
    timed = {name: figures[RATE] for name, figures in found.items() if RATE in figures and LISTS.get(name)}
    if not timed:
        raise SystemExit(f"error: nothing could be measured: see {options.out / 'logs'}")
    print(f"actor_rollout_ref.actor.engine.fp8_modules=[{','.join(LISTS[min(timed, key=timed.get)])}]")


if __name__ == "__main__":
    main()
