"""What `sample` and `eval` both are told: what to draw, and how."""

import argparse
from dataclasses import dataclass, field
from typing import Any

from verl_omni.utils.options import at_least


@dataclass
class Prompt:
    text: str
    negative: str = ""
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    images: Any = None
    size: dict[str, int | float] = field(default_factory=dict)  # where it asks for one of its own


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="what to draw; may be given several times")
    add("--prompts", metavar="FILE", help="prompts as for training: .txt, .jsonl, .parquet, a folder with captions")
    add("--limit", type=at_least(1), metavar="N", help="only the first so many of them")
    add("--seeds", type=at_least(0), nargs="+", default=[0], metavar="SEED", help="an image for each (%(default)s)")
    add("--model", metavar="DIR", help="the model that was trained, where it lies elsewhere now")
    how = "height, num_inference_steps, ...: fields of rollout.pipeline; by default as a row says, or the run validated"
    add("--set", action="append", default=[], metavar="NAME=VALUE", help=how)
    add("--batch-size", type=at_least(1), default=4, help="images at once (%(default)s)")
    add("--device", choices=("cpu", "cuda"), help="by default a GPU if there is one")
    add("--external-lib", metavar="MODULE", help="your modules, or files x.py, that register models or rewards")


def read_prompts(options: argparse.Namespace) -> list[Prompt]:
    found = [Prompt(text) for text in options.prompt]
    if options.prompts:
        from verl_omni.data import PromptDataset
        from verl_omni.data.prompt_rows import SIZES

        typed = read_settings(options.set)  # comes before what a row says
        for row in PromptDataset(options.prompts, max_samples=options.limit or -1, key="--prompts"):
            truth = row["reward_model"].get("ground_truth")
            size = {name: row[name] for name in SIZES if row.get(name) is not None and name not in typed}
            texts = row["prompt"], row["negative_prompt"]
            found.append(Prompt(*texts, truth, row["extra_info"], row.get("images"), size))
    if not found:
        raise ValueError("say what to draw: --prompt TEXT, or --prompts FILE")
    return found


def read_settings(given: list[str]) -> dict[str, Any]:
    import yaml

    pairs = [one.partition("=") for one in given]
    if wrong := next((name for name, equals, _ in pairs if not equals), None):
        raise ValueError(f"--set {wrong}: expected NAME=VALUE, such as --set num_inference_steps=20")
    return {name: yaml.safe_load(value) for name, _, value in pairs}
