"""Make training data for GenEval: prompts, each with the metadata by which its images are judged.

    verl-omni prepare-geneval --train train_metadata.jsonl --test evaluation_metadata.jsonl --output data/geneval

The inputs are JSONL files as the GenEval project has them: a line is
`{"tag": "counting", "include": [{"class": "clock", "count": 2}], "prompt": "a photo of two clocks"}`.
"""

import argparse
import json
import sys
from pathlib import Path

from verl_omni.utils.options import Parser


def read_rows(path: Path, split: str, negative_prompt: str) -> list[dict]:
    """The rows of a file, each of them checked by what will judge it."""
    from verl_omni.rewards.scorers.geneval.tasks import read_task
    from verl_omni.utils.json_files import parse_object
    from verl_omni.utils.suggest import nearest

    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            told = parse_object(line, "the line")
            for name in ("prompt", "tag", "include"):
                if name not in told:
                    raise ValueError(f'there is no "{name}".{nearest(name, told)}')
            read_task(told, None)
            prompt = told["prompt"]
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: {error}: {line[:100]}") from None
        rows.append(
            {
                "data_source": "geneval",
                "prompt": [{"role": "user", "content": prompt}],
                "negative_prompt": negative_prompt,
                # As text: a parquet column could not hold what differs from prompt to prompt.
                "reward_model": {"style": "rule", "ground_truth": json.dumps(told)},
                "extra_info": {"split": split, "index": len(rows)},
            }
        )
    if not rows:
        raise ValueError(f"{path} has no prompts")
    return rows


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, required=True, help="metadata of the training prompts")
    parser.add_argument("--test", type=Path, required=True, help="metadata of the prompts to validate on")
    parser.add_argument("--output", type=Path, required=True, help="folder for train.parquet and test.parquet")
    parser.add_argument(
        "--negative-prompt", default=" ", help="of all prompts; a space, as Qwen-Image has it"
    )
    options = parser.parse_args()
    try:
        splits = {name: read_rows(getattr(options, name), name, options.negative_prompt) for name in ("train", "test")}
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    import pyarrow as pa
    import pyarrow.parquet as pq

    options.output.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        path = options.output / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
        print(f"{path}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
