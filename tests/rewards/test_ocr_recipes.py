"""Each OCR recipe with the reward that it selects, on drawn scenes: legible text scores high, other text low."""

import asyncio
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from PIL import Image
from tiny_models import tiny_checkpoint
from verl.protocol import DataProto

from verl_omni.config import schema
from verl_omni.data.loading import load_datasets
from verl_omni.rewards.choice import rewards_of
from verl_omni.rewards.image_manager import ImageRewardManager
from verl_omni.rewards.reward_loop import load_custom_reward_function
from verl_omni.testing.scenes import Sign, draw_scene

pytest.importorskip("rapidocr")

EXAMPLES = Path(__file__).parents[2] / "examples"
FOLDER = Path(__file__).parents[2] / "verl_omni/recipes"
RECIPES = sorted(path.name for path in FOLDER.glob("*ocr*.yaml"))

# (wanted, what the scene shows, font, size, least score, most)
SCENES = [
    ("Grand Opening", "Grand Opening", "plain", 52, 1, 1),
    ("Fresh Bread Daily", "Fresh Bread Daily", "bold", 36, 1, 1),
    ("Mind the Gap", "MIND THE GAP", "DejaVuSerif.ttf", 44, 1, 1),
    ("Step Goal Achieved", "Step Goal Achieved", "DejaVuSansMono.ttf", 30, 1, 1),
    ("Lost City Near", "Lost City\nNear", "DejaVuSerif-Bold.ttf", 40, 1, 1),
    ("Open 24 Hours", "Open 24 Hours", "tilted", 44, 1, 1),
    ("Exit 12", "Exit 12", "plain", 24, 1, 1),
    # one letter of twenty is missing, and there is other text: nearly right
    ("Spring Collection 2024", "Spring Colection 2024", "plain", 36, 0.94, 0.96),
    # other text, which may hold the wanted letters
    ("Forever Yours", "No Parking Today", "plain", 44, 0, 0.4),
    ("Art", "Start", "plain", 70, 0, 0.4),
    ("Open", "OPENING SOON", "bold", 44, 0, 0.4),
    ("98", "Room 4987", "plain", 52, 0, 0.4),
    ("Welcome Home", "", "plain", 44, 0, 0.4),
]


def scene(text: str, kind: str, size: int, seed: int) -> Image.Image:
    how = {"bold": {"stroke": 1}, "tilted": {"angle": 8.0}}.get(kind, {})
    return draw_scene(Sign(text, kind, size, **how), seed)


def row(item: dict, image: Image.Image) -> DataProto:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    fields = {key: np.array([item[key]], dtype=object) for key in ("data_source", "prompt", "reward_model")}
    return DataProto.from_dict({"responses": pixels[None]}, fields)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """What the recipes' own script makes of the prompts."""
    script = EXAMPLES / "flowgrpo_trainer/data_process/qwenimage_ocr.py"
    spec = importlib.util.spec_from_file_location("qwenimage_ocr", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = tmp_path_factory.mktemp("ocr")
    for split in ("train", "test"):
        (folder / f"{split}.txt").write_text("".join(f'a street with a sign that reads "{s[0]}"\n' for s in SCENES))
    module.main(["--input", str(folder), "--output", str(folder)])
    return folder


@pytest.fixture(scope="module")
def known() -> dict:
    """Answers by reward and settings: recipes that select the same reward need not read the scenes again."""
    return {}


async def scores(config, rows: list[DataProto], known: dict) -> list[dict]:
    manager = ImageRewardManager(config, None, compute_score=load_custom_reward_function(config.reward))
    (choice,) = rewards_of(rows[0].non_tensor_batch["data_source"][0], manager.choices)
    key = repr(choice)
    if key not in known:
        known[key] = await asyncio.gather(*(manager.run_single(row) for row in rows))
    return known[key]


@pytest.mark.parametrize("recipe", RECIPES)
def test_scenes_are_read_as_a_person_reads_them(recipe, data, known, monkeypatch):
    monkeypatch.setenv("MODEL_PATH", str(tiny_checkpoint()))
    monkeypatch.setenv("DATA_DIR", str(data))
    schema.register()
    with initialize_config_dir(str(FOLDER), version_base=None):
        config = compose(Path(recipe).stem, ["hydra.searchpath=[pkg://verl_omni.trainer.config]"])
    train, _ = load_datasets(config)
    rows = [row(train[i], scene(*shown, seed=i)) for i, (_, *shown, _, _) in enumerate(SCENES)]
    answers = asyncio.run(scores(config, rows, known))
    for (wanted, shown, kind, _, least, most), answer in zip(SCENES, answers, strict=True):
        told = f'"{wanted}" in a scene that shows "{shown}" ({kind}): {answer}'
        assert least - 1e-6 <= answer["reward_score"] <= most + 1e-6, told


def test_there_are_recipes():
    assert len(RECIPES) >= 10
