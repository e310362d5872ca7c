"""Draw images, videos or sounds with a model, or with what a run has trained.

    verl-omni sample outputs/run --prompt "a red cube" --seeds 0 1 2 3
    verl-omni sample outputs/run/global_step_50 --prompts prompts.txt --out drawn/
    verl-omni sample /models/Qwen-Image --prompt "a red cube" --set num_inference_steps=20

Writes the images, samples.jsonl, which `verl-omni score --samples` takes, and grid.png, a row for each prompt and a
column for each seed. A run with a rewriter draws what that makes of the prompts.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_omni.cli.draw_options import Prompt, add_options, read_prompts, read_settings
from verl_omni.utils.options import Parser

if TYPE_CHECKING:
    from verl_omni.cli.painter import Painter
    from verl_omni.utils.responses import Response


def main() -> None:
    parser = Parser(
        "verl-omni sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("weights", metavar="RUN|CHECKPOINT|MODEL", help="a folder; of a run, its last checkpoint")
    add_options(parser)
    parser.add_argument("--out", default="samples", help="folder for the images (%(default)s)")
    options = parser.parse_args()
    try:
        _run(options)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


def _run(options: argparse.Namespace) -> None:
    from verl_omni.cli.trained import find_weights
    from verl_omni.report.galleries import file_of
    from verl_omni.rewards.by_hand import GRID
    from verl_omni.utils.external_lib import import_external_lib

    import_external_lib(options.external_lib, "--external-lib")
    prompts, weights = read_prompts(options), find_weights(options.weights, options.model)
    from verl_omni.cli.painter import Painter
    from verl_omni.workers.engine.module import quiet_loading

    quiet_loading()
    painter = Painter(weights, read_settings(options.set), options.device)
    out = Path(options.out)
    rows, _ = draw_all(painter, prompts, options.seeds, options.batch_size, out, weights.name)
    if not painter.kind.is_seen:
        print(f"{painter.kind.name.capitalize()}s: {out}")
        return
    write_grid([out / file_of(row) for row in rows], len(options.seeds), out / GRID)
    print(f"{painter.kind.name.split()[0].capitalize()}s: {out}, all of them in {out / GRID}")


def draw_all(
    painter: "Painter", prompts: Sequence[Prompt], seeds: Sequence[int], at_once: int, out: Path, who: str
) -> tuple[list[dict[str, Any]], "list[Response | None]"]:
    """One of each prompt with each seed, written as it comes: (the lines of samples.jsonl, what was drawn).

    Images are left out of the second: their files have the same pixels. Those of videos and sounds are smaller copies.
    """
    from tqdm import tqdm

    from verl_omni.agent_loop.outputs import written
    from verl_omni.data.open_images import open_images

    wanted = [(i, prompt, seed) for i, prompt in enumerate(prompts) for seed in seeds]
    rows, kept, bar = [], [], tqdm(total=len(wanted), desc=f"drawing with {who}", unit=painter.kind.name.split()[0])
    for prompt in prompts:
        painter.check_size(prompt.text, prompt.size)
    out.mkdir(parents=True, exist_ok=True)
    with bar, (out / "samples.jsonl").open("w", encoding="utf-8") as file:
        for part in _parts(wanted, at_once):
            drawn = painter.draw(
                [prompt.text for _, prompt, _ in part],
                [seed for *_, seed in part],
                [prompt.negative for _, prompt, _ in part],
                [open_images(prompt.images) for _, prompt, _ in part],
                [prompt.size for _, prompt, _ in part],
            )
            for (i, prompt, seed), one in zip(part, drawn, strict=True):
                told = {"prompt": prompt.text, "ground_truth": prompt.ground_truth, "extra_info": prompt.extra_info}
                place = written(one.response, out / f"{i:04d}_seed{seed}")
                rows.append({**place, "seed": seed, **told, **one.told})
                kept.append(None if painter.kind.name == "image" else one.response)
                file.write(json.dumps(rows[-1], ensure_ascii=False, default=str) + "\n")
            bar.update(len(part))
    return rows, kept


def _parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def write_grid(images: Sequence[Path], columns: int, out: Path) -> None:
    """All in one picture, so many in a row; of a video its first frame."""
    from PIL import Image

    from verl_omni.utils.image_files import frames_in

    first = [next(frames_in(path)) for path in images]
    width, height = max(image.width for image in first), max(image.height for image in first)
    grid = Image.new("RGB", (columns * width, -(-len(first) // columns) * height), "white")
    for i, image in enumerate(first):
        grid.paste(image, (i % columns * width, i // columns * height))
    grid.save(out)


if __name__ == "__main__":
    main()
