"""Whether each shipped recipe fits on eight GPUs of 80 GB, as `verl-omni plan` says it. No GPU, no weights.

    python -m benchmarks.plan_recipes                                  # on any machine
    python -m benchmarks.plan_recipes --write docs/plan.md             # the table, where it says <!-- RECIPES -->

The folders of the models are made here, with the configs of their real parts (`recipe_models`).
"""

import argparse
import os
import tempfile
from pathlib import Path

from benchmarks.recipe_models import OF_RECIPES, WITH_IMAGES, kind_of

GPUS, MEMORY, GPU = 8, 80, "h100"
OFFLINE = "qwen_image_lora_offline_dpo"  # takes pairs that were encoded, not prompts
SAID = {"REWARD_ADDRESS": "localhost:1", "JUDGE_ADDRESS": "http://localhost:1/v1", "JUDGE_MODEL": "judge"}


def write_prompts(folder: Path, images: bool = False) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    folder.mkdir()
    prompt = 'a photograph of a street at dusk, with a shop whose sign reads "Grand Opening"'
    row = {"data_source": "ocr", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "Grand Opening"}}
    if images:
        Image.new("RGB", (512, 512)).save(folder / "street.png")
        row["images"] = [str(folder / "street.png")]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row | {"negative_prompt": " "}] * 96), folder / f"{split}.parquet")
    return folder


def write_rewriter(folder: Path) -> Path:
    """A tiny one: what a rewriter takes is not in the plan."""
    from verl_omni.testing.tiny_text import language_model, qwen_tokenizer

    tokenizer = qwen_tokenizer(["user assistant system\n"])
    for part in (tokenizer, language_model(tokenizer)):
        part.save_pretrained(folder)
    return folder


def write_inputs(folder: Path) -> dict[str, str]:
    """What the recipes take from the environment, whatever model they train."""
    (folder / "teacher").mkdir()
    (folder / "teacher/pytorch_lora_weights.safetensors").touch()
    return SAID | {"TEACHER": str(folder / "teacher"), "REWRITER_PATH": str(write_rewriter(folder / "rewriter"))}


def write_model(folder: Path, kind: str) -> dict[str, str]:
    """And what goes with the model."""
    if not folder.is_dir():
        folder.mkdir()
        OF_RECIPES[kind](folder / "model")
        write_prompts(folder / "data", kind in WITH_IMAGES)
    return {"MODEL_PATH": str(folder / "model"), "DATA_DIR": str(folder / "data")}


def planned(name: str, known: dict) -> str:
    """A line of the table."""
    from hydra import compose, initialize_config_dir

    from verl_omni.cli import recipes
    from verl_omni.config import schema
    from verl_omni.trainer.forecast.forecast import forecast

    schema.register()
    with initialize_config_dir(str(recipes.FOLDER), version_base=None):
        config = compose(name, ["hydra.searchpath=[pkg://verl_omni.trainer.config]"])
    way = forecast(config, GPUS, MEMORY, GPU, known, remember=True).asked
    highest = max(way.stages, key=lambda stage: stage.peak)
    peak, update = (stage.peak / 2**30 for stage in (highest, next(s for s in way.stages if s.name == "update")))
    fits = "yes" if way.fits else "no"
    return f"| `{name}` | {peak:.1f} ({highest.name}) | {update:.1f} | {fits} | {way.seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="recipes by their names")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="fill its <!-- RECIPES -->")
    options = parser.parse_args()
    from verl_omni.cli import recipes

    names = options.only or [name for name in recipes.shipped() if name != OFFLINE]
    lines = ["| recipe | peak, GiB (stage) | update, GiB | fits | seconds a step |", "|---" * 5 + "|"]
    print("\n".join(lines), flush=True)
    known: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= write_inputs(Path(folder))
        for name in names:
            os.environ |= write_model(Path(folder) / kind_of(name), kind_of(name))
            lines.append(planned(name, known))
            print(lines[-1], flush=True)
    if options.write:
        from verl_omni.report.document_tables import fill

        options.write.write_text(fill(options.write.read_text(), "RECIPES", "\n".join(lines)))


if __name__ == "__main__":
    main()
