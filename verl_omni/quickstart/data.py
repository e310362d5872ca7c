"""Prompts of the quickstart's tasks as parquet files in verl's layout."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from verl_omni.quickstart.task import prompt_for, split_numbers


def write_data(out: str | Path, prompt: Callable[[str], str] = prompt_for) -> tuple[Path, Path]:
    """Write ``train.parquet`` (800 prompts) and ``val.parquet`` (200 numbers never trained on); returns both paths.

    ``prompt`` says how a number is asked for.
    """
    return write_rows(out, "ocr_line", *([(prompt(number), number) for number in part] for part in split_numbers()))


def write_rows(
    out: str | Path, reward: str, train: Sequence[tuple[str, str]], val: Sequence[tuple[str, str]]
) -> tuple[Path, Path]:
    """The same of any (prompt, ground truth), which the scorer of that name is to score."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    for split, asked in (("train", train), ("val", val)):
        rows = [
            {
                "data_source": reward,
                "prompt": [{"role": "user", "content": prompt}],
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index},
            }
            for index, (prompt, truth) in enumerate(asked)
        ]
        path = out / f"{split}.parquet"
        unfinished = path.with_suffix(".tmp")
        pq.write_table(pa.Table.from_pylist(rows), unfinished)
        unfinished.replace(path)
        paths.append(path)
    return paths[0], paths[1]
