"""Write a few prompts as train.parquet and test.parquet, for smoke tests.

    python tests/special_e2e/create_dummy_diffusion_data.py --output /tmp/dummy --num-prompts 8
"""

import argparse
import random
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

THINGS = ("a sign", "a red ball", "a lighthouse", "a cat on a chair", "two cups", "a paper boat")
PLACES = ("in the snow", "by the sea", "on a wooden table", "at night", "in a field", "under a bridge")


def make_rows(count: int, split: str, data_source: str, rng: random.Random) -> list[dict]:
    rows = []
    for index in range(count):
        number = f"{rng.randrange(1000):03d}"
        text = f'{rng.choice(THINGS)} {rng.choice(PLACES)} with the number "{number}"'
        rows.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": text}],
                "negative_prompt": " ",
                "reward_model": {"style": "rule", "ground_truth": number},
                "extra_info": {"split": split, "index": index},
            }
        )
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a few prompts as train.parquet and test.parquet.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--num-prompts", type=int, default=8, help="training prompts (8)")
    parser.add_argument("--num-test-prompts", type=int, default=4, help="test prompts (4)")
    parser.add_argument("--data-source", default="jpeg_compressibility", help="names the reward (jpeg_compressibility)")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same prompts (0)")
    args = parser.parse_args(argv)
    if min(args.num_prompts, args.num_test_prompts) < 1:
        sys.exit("error: --num-prompts and --num-test-prompts must be 1 or more")
    rng = random.Random(args.seed)
    args.output.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", args.num_prompts), ("test", args.num_test_prompts)):
        path = args.output / f"{split}.parquet"
        pq.write_table(pa.Table.from_pylist(make_rows(count, split, args.data_source, rng)), path)
        print(f"{path}: {count} prompts")


if __name__ == "__main__":
    main()
