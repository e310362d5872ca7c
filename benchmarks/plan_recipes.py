"""Whether each shipped recipe fits on eight GPUs of 80 GB, as `verl-omni plan` says it. No GPU, no weights.

    python -m benchmarks.plan_recipes                                  # on any machine
    python -m benchmarks.plan_recipes --write docs/plan.md             # the table, where it says <!-- RECIPES -->

The folder of Qwen-Image is made here, with the configs of its real parts.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from benchmarks import models

GPUS, MEMORY, GPU = 8, 80, "h100"
# Qwen2.5-VL 7B: what `models.qwen_image` makes smaller
LAYERS = 28
WRITER = {"num_hidden_layers": LAYERS, "layer_types": ["full_attention"] * LAYERS, "intermediate_size": 18944}
EYES = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
OFFLINE = "qwen_image_lora_offline_dpo"  # takes pairs that were encoded, not prompts


def write_model(folder: Path) -> Path:
    models.qwen_image(folder)
    path = folder / "text_encoder/config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(WRITER, vocab_size=152064)
    config["vision_config"].update(EYES)
    path.write_text(json.dumps(config))
    return folder


def write_inputs(folder: Path) -> dict[str, str]:
    """What the recipes take from the environment."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    prompt = 'a photograph of a street at dusk, with a shop whose sign reads "Grand Opening"'
    row = {"data_source": "ocr", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "Grand Opening"}}
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist([row | {"negative_prompt": " "}] * 64), folder / f"{split}.parquet")
    (folder / "teacher").mkdir()
    (folder / "teacher/pytorch_lora_weights.safetensors").touch()
    places = {"MODEL_PATH": write_model(folder / "model"), "DATA_DIR": folder, "TEACHER": folder / "teacher"}
    return {name: str(path) for name, path in places.items()} | {"REWARD_ADDRESS": "localhost:1"}


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
            lines.append(planned(name, known))
            print(lines[-1], flush=True)
    if options.write:
        from verl_omni.report.document_tables import fill

        options.write.write_text(fill(options.write.read_text(), "RECIPES", "\n".join(lines)))


if __name__ == "__main__":
    main()
