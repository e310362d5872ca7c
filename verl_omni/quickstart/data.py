"""Prompts of the quickstart as parquet files in verl's layout."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl_omni.quickstart.task import prompt_for, split_numbers


def write_data(out: str | Path, prompt: Callable[[str], str] = prompt_for) -> tuple[Path, Path]:
    """Write ``train.parquet`` (800 prompts) and ``val.parquet`` (200 numbers never trained on); returns both paths.

    ``prompt`` says how a number is asked for.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, numbers in zip(("train", "val"), split_numbers(), strict=True):
        rows = [
            {
                "data_source": "ocr_line",
                "prompt": [{"role": "user", "content": prompt(number)}],
                "reward_model": {"style": "rule", "ground_truth": number},
                "extra_info": {"split": split, "index": index},
            }
            for index, number in enumerate(numbers)
        ]
        path = out / f"{split}.parquet"
        unfinished = path.with_suffix(".tmp")
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
        unfinished.replace(path)
        paths.append(path)
    return paths[0], paths[1]
