"""Make training data for the OCR task: prompts with the text to render in double quotes, that text as ground truth.

    verl-omni prepare-ocr --input prompts.txt --output data/ocr --holdout 100

The input is a text file with one prompt a line, or a folder with train.txt and test.txt; the output is train.parquet
and test.parquet in verl's layout. The prompt is stored as the user's text alone: Qwen-Image's template is added later,
by the model's adapter.
"""

import argparse
import random
import re
import sys
from pathlib import Path

from verl_omni.utils.options import Parser, at_least

# The outermost pair wins: "He said “hi”" gives He said “hi”. Single quotes are apostrophes more often than quotes.
QUOTED = re.compile(r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]')


def ground_truth(prompt: str) -> str:
    """The quoted text of a prompt; several quoted texts are joined by a space, in their order."""
    found = [next(group for group in match.groups() if group is not None).strip() for match in QUOTED.finditer(prompt)]
    rest = QUOTED.sub("", prompt)
    if re.search(r'["“”„]', rest):
        raise ValueError("a double quote without its partner")
    if not any(found):
        raise ValueError('no text in double quotes; expected something like: a sign that reads "407"')
    if not all(found):
        raise ValueError("an empty pair of double quotes")
    return " ".join(found)


def read_prompts(path: Path, skip_bad: bool) -> list[tuple[str, str]]:
    """(prompt, ground truth) of every line. Blank lines are no prompts; any other line without quoted text is bad."""
    prompts, bad = [], 0
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        prompt = line.strip()
        if not prompt:
            continue
        try:
            prompts.append((prompt, ground_truth(prompt)))
        except ValueError as error:
            message = f"{path}, line {number}: {error}: {prompt[:100]}"
            if not skip_bad:
                raise ValueError(f"{message} (--skip-bad leaves such lines out)") from None
            print(f"left out: {message}", file=sys.stderr)
            bad += 1
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    if bad:
        print(f"{path}: {bad} lines left out", file=sys.stderr)
    return prompts


def write_split(prompts: list[tuple[str, str]], split: str, folder: Path, negative_prompt: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "data_source": "ocr",
            "prompt": [{"role": "user", "content": prompt}],
            "negative_prompt": negative_prompt,
            "reward_model": {"style": "rule", "ground_truth": text},
            "extra_info": {"split": split, "index": index},
        }
        for index, (prompt, text) in enumerate(prompts)
    ]
    path = folder / f"{split}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"{path}: {len(rows)} prompts")


def load_splits(source: Path, holdout: int, skip_bad: bool) -> dict[str, list[tuple[str, str]]]:
    if source.is_dir():
        if holdout:
            raise ValueError(f"--holdout is for a single file; {source} is a folder whose test.txt is held out")
        missing = [name for name in ("train.txt", "test.txt") if not (source / name).is_file()]
        if missing:
            raise ValueError(f"{source} has no {' and no '.join(missing)}")
        return {split: read_prompts(source / f"{split}.txt", skip_bad) for split in ("train", "test")}
    if not source.is_file():
        raise ValueError(f"no such file or folder: {source}")
    prompts = read_prompts(source, skip_bad)
    if not 0 <= holdout < len(prompts):
        raise ValueError(f"--holdout {holdout}: {source} has {len(prompts)} prompts, give 0 to {len(prompts) - 1}")
    held = set(random.Random(0).sample(range(len(prompts)), holdout))
    splits = {"train": [p for i, p in enumerate(prompts) if i not in held]}
    return splits | ({"test": [prompts[i] for i in sorted(held)]} if held else {})


def main(argv: list[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="a .txt file, or a folder with train.txt, test.txt")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the parquet files to")
    parser.add_argument("--holdout", type=at_least(0), default=0, help="single file: so many go to test.parquet (0)")
    parser.add_argument("--negative-prompt", default=" ", help='negative prompt of every row (" ", as Qwen-Image uses)')
    parser.add_argument("--skip-bad", action="store_true", help="leave out lines without quoted text, and say so")
    args = parser.parse_args(argv)
    try:
        splits = load_splits(args.input, args.holdout, args.skip_bad)
    except ValueError as error:
        sys.exit(f"error: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    for split, prompts in splits.items():
        write_split(prompts, split, args.output, args.negative_prompt)


if __name__ == "__main__":
    main()
