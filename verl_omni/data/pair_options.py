"""The options of `verl-omni prepare-pairs`, apart from what does it: a help page takes no torch."""

import argparse

from verl_omni.utils.options import Parser, at_least

ABOUT = """Turn preference pairs (prompt, chosen and rejected image) into cached latents and prompt features.

    verl-omni prepare-pairs MODEL DATA OUT --height 512 --width 512

DATA is a .parquet or .jsonl file, or a folder with one `metadata.jsonl` or `metadata.parquet`. Its rows are either
pairs (`prompt`, `chosen`, `rejected`, and if you have them `chosen_score` and `rejected_score`) or single images
(`prompt`, `image`, and `score`), where each two rows in turn are the chosen and the rejected image of one prompt. An
image is a path (relative to DATA's folder) or its bytes.

All rows are checked before anything is written. The cache grows in OUT.partial, goes on there after an interruption,
and becomes OUT when it is whole and has been read back. Train with
`actor_rollout_ref.model.algorithm=dpo algorithm.sample_source=offline data.train_files=OUT`.
"""


def parser() -> argparse.ArgumentParser:
    parser = Parser(description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="diffusers folder of the model to train")
    parser.add_argument("data", metavar="DATA", help="pairs: .parquet, .jsonl, or a folder with a metadata file")
    parser.add_argument("out", metavar="OUT", help="folder of the cache")
    parser.add_argument("--height", type=at_least(1), required=True, help="of the images, in pixels")
    parser.add_argument("--width", type=at_least(1), required=True)
    parser.add_argument("--max-sequence-length", type=at_least(1), help="in tokens; by default the model's limit")
    parser.add_argument("--pairs-per-shard", type=at_least(1), default=64, help="so many are lost at an interruption")
    parser.add_argument("--resize", action="store_true", help="scale images of another size, and cut off what is over")
    parser.add_argument("--device", help="cpu or cuda; by default a GPU if there is one")
    return parser
