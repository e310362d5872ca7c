"""How fast the OCR reward reads drawn scenes, and how well, beside a plain loop over rapidocr.

    python -m benchmarks.ocr_speed [--scenes 48] [--batch 8] [--threads 1]

Scenes are 512 x 512, with a sign of two to five words in fonts, sizes, colours and angles drawn at random, and three
other signs. Both ways read the same scenes in turns, a batch at a time, so that both have the machine's good and bad
moments; what they read is compared with the drawn truth in the same way. Prints a table in Markdown.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from PIL import Image

from verl_omni.rewards.scorers.ocr import SHARE_WRONG, _squeeze
from verl_omni.rewards.text_reader import read_text
from verl_omni.testing.scenes import draw_scene, legible_signs

Reader = Callable[[list[Image.Image]], list[str]]


def plain_loop(threads: int) -> Reader:
    """rapidocr as it comes, image by image."""
    from rapidocr import RapidOCR

    params = {"Global.log_level": "critical", "EngineConfig.onnxruntime.intra_op_num_threads": threads}
    engine = RapidOCR(params=params)

    def read(images: list[Image.Image]) -> list[str]:
        return [" ".join(engine(np.array(image)[:, :, ::-1]).txts or ()) for image in images]

    return read


def measure(readers: dict[str, Reader], images: list[Image.Image], batch: int) -> dict[str, dict[str, list]]:
    """Texts, seconds and seconds of computing of each reader, batch by batch in turns."""
    found: dict[str, dict[str, list]] = {name: {"texts": [], "seconds": [], "computing": []} for name in readers}
    for read in readers.values():
        read(images[:1])  # models are loaded by the first call
    for start in range(0, len(images), batch):
        for name, read in readers.items():
            began, computed = time.perf_counter(), time.process_time()
            found[name]["texts"] += read(images[start : start + batch])
            found[name]["seconds"].append(time.perf_counter() - began)
            found[name]["computing"].append(time.process_time() - computed)
    return found


def table(found: dict[str, dict[str, list]], truths: list[str]) -> str:
    lines = ["| reader | images/s | s of computing an image | mean score | all right |", "|---|---|---|---|---|"]
    for name, told in found.items():
        scores = [
            1 - SHARE_WRONG["words"](text, _squeeze(truth)) for text, truth in zip(told["texts"], truths, strict=True)
        ]
        count = len(scores)
        lines.append(
            f"| {name} | {count / sum(told['seconds']):.2f} | {sum(told['computing']) / count:.2f} "
            f"| {statistics.mean(scores):.4f} | {sum(score == 1 for score in scores)} of {count} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=48, help="how many (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="images of a call, as reward.batch_size (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of onnxruntime, for both (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    signs = list(legible_signs(options.scenes, options.seed))
    images = [draw_scene(sign, seed) for seed, sign in enumerate(signs)]
    readers: dict[str, Reader] = {
        "the reward's": lambda images: read_text(images, num_threads=options.threads),
        "plain loop over rapidocr": plain_loop(options.threads),
    }
    print(table(measure(readers, images, options.batch), [sign.text for sign in signs]))


if __name__ == "__main__":
    main()
