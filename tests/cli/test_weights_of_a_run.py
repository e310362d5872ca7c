"""`verl-omni sample` and `export` on a tiny run: the same images as its validation, and in plain diffusers."""

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from safetensors.torch import load_file
from tiny_models import tiny_checkpoint

from verl_omni.cli import export, sample
from verl_omni.cli.painter import Painter
from verl_omni.cli.trained import LORA_FILE, find_weights


def run(command, monkeypatch, *arguments) -> str | None:
    monkeypatch.setattr(sys, "argv", ["verl-omni", *map(str, arguments)])
    try:
        command.main()
    except SystemExit as ended:
        return ended.code


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path))


def check_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """But for a pixel or two in the middle between two values: a product of other rows may round its last bit
    differently, and on some processors does."""
    off = np.abs(ours.astype(int) - theirs)
    assert off.max() <= 1 and (off > 0).mean() < 1e-3


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def drawn_by_diffusers(pipe: QwenImagePipeline, prompt: str = "a cat") -> np.ndarray:
    """As the tiny run validates: without guidance, three steps, 32 x 32."""
    pipe.set_progress_bar_config(disable=True)
    image = pipe(prompt, height=32, width=32, num_inference_steps=3, generator=torch.Generator().manual_seed(5))
    return np.asarray(image.images[0])


def test_a_run_draws_what_its_validation_drew(tiny_run, tmp_path, monkeypatch):
    shown = lines(tiny_run / "validation/step_2/samples.jsonl")
    seeds = [row["seed"] for row in shown]
    assert run(sample, monkeypatch, tiny_run, "--prompts", tiny_run.parent / "prompts.txt", "--seeds", *seeds,
               "--out", tmp_path / "drawn") is None  # fmt: skip
    rows = lines(tmp_path / "drawn/samples.jsonl")
    assert [(row["prompt"], row["seed"]) for row in rows] == [(s["prompt"], n) for s in shown for n in seeds]
    for i, row in enumerate(shown):
        ours = pixels(tmp_path / "drawn" / rows[i * len(seeds) + i]["image"])
        check_same(ours, pixels(tiny_run / "validation/step_2" / row["image"]))
    assert pixels(tmp_path / "drawn/grid.png").shape == (3 * 32, 3 * 32, 3)


def test_a_prompt_is_drawn_in_the_size_that_its_row_asks_for(tiny_run, tmp_path, monkeypatch):
    """As in training, and whatever else is drawn with it; what is typed comes first."""
    rows = [{"prompt": "a cat"}, {"prompt": "a cat", "height": 64, "width": 48}, {"prompt": "a dog", "height": 48}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["--prompts", tmp_path / "rows.jsonl", "--seeds", 5]
    assert run(sample, monkeypatch, tiny_run, *asked, "--out", tmp_path / "drawn") is None
    shapes = [pixels(tmp_path / "drawn" / row["image"]).shape[:2] for row in lines(tmp_path / "drawn/samples.jsonl")]
    assert shapes == [(32, 32), (64, 48), (48, 32)]
    run(sample, monkeypatch, tiny_run, "--prompt", "a cat", "--seeds", 5, "--out", tmp_path / "alone")
    assert np.array_equal(pixels(tmp_path / "drawn/0000_seed5.png"), pixels(tmp_path / "alone/0000_seed5.png"))
    run(sample, monkeypatch, tiny_run, *asked, "--set", "height=32", "--out", tmp_path / "typed")
    assert pixels(tmp_path / "typed/0001_seed5.png").shape[:2] == (32, 48)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a cat", "height": 31}\n')
    said = run(sample, monkeypatch, tiny_run, *asked, "--out", tmp_path / "never")
    assert said.startswith('error: the prompt "a cat"') and "height=31" in said and not (tmp_path / "never").exists()


def test_checkpoints_and_the_model_itself_draw_other_images(tiny_run, tmp_path, monkeypatch):
    model = tiny_checkpoint()
    size = ["--set", "height=32", "--set", "width=32", "--set", "num_inference_steps=3"]
    for name, place, more in (("0", model, size), ("1", tiny_run / "global_step_1", []), ("2", tiny_run, [])):
        run(sample, monkeypatch, place, "--prompt", "a cat", "--seeds", 5, "--out", tmp_path / name, *more)
    zero, one, two = (pixels(tmp_path / name / "0000_seed5.png").astype(int) for name in "012")
    assert np.array_equal(zero, drawn_by_diffusers(QwenImagePipeline.from_pretrained(model)))
    assert np.abs(zero - one).max() > 0 and np.abs(one - two).max() > 0


def test_the_lora_in_diffusers(tiny_run, tmp_path, monkeypatch):
    run(export, monkeypatch, tiny_run, tmp_path / "lora")
    run(sample, monkeypatch, tiny_run, "--prompt", "a cat", "--seeds", 5, "--out", tmp_path / "drawn")
    pipe = QwenImagePipeline.from_pretrained(tiny_checkpoint())
    pipe.load_lora_weights(tmp_path / "lora", weight_name=LORA_FILE)
    check_same(drawn_by_diffusers(pipe), pixels(tmp_path / "drawn/0000_seed5.png"))


def test_kohyas_keys_are_read_back_by_diffusers(tiny_run, tmp_path, monkeypatch):
    """Its own converter, for the files of other programs, gives the LoRA that was exported."""
    assert run(export, monkeypatch, tiny_run, tmp_path / "kohya", "--format", "kohya") is None
    state = load_file(tmp_path / "kohya" / LORA_FILE)
    layer = "lora_unet_transformer_blocks_0_attn_to_q"
    assert {f"{layer}.lora_down.weight", f"{layer}.lora_up.weight", f"{layer}.alpha"} <= state.keys()
    assert state[f"{layer}.alpha"].item() == 8 and len(state[f"{layer}.lora_down.weight"]) == 4
    pipe, ours = (QwenImagePipeline.from_pretrained(tiny_checkpoint()) for _ in range(2))
    pipe.load_lora_weights(tmp_path / "kohya", weight_name=LORA_FILE)
    ours.load_lora_weights(tiny_run / "global_step_2/export", weight_name=LORA_FILE)
    difference = drawn_by_diffusers(pipe).astype(int) - drawn_by_diffusers(ours)
    assert np.abs(difference).max() <= 1  # the converter multiplies alpha / rank into the weights


def test_merged_weights_are_a_model(tiny_run, tmp_path, monkeypatch):
    assert run(export, monkeypatch, tiny_run, tmp_path / "model", "--format", "merged") is None
    run(sample, monkeypatch, tiny_run, "--prompt", "a cat", "--seeds", 5, "--out", tmp_path / "drawn")
    merged = drawn_by_diffusers(QwenImagePipeline.from_pretrained(tmp_path / "model")).astype(int)
    assert np.abs(merged - pixels(tmp_path / "drawn/0000_seed5.png")).max() <= 1
    assert find_weights(tmp_path / "model").export is None


def test_a_model_that_lies_elsewhere_now(tiny_run, tmp_path, monkeypatch):
    moved = shutil.copytree(tiny_run / "global_step_2/export", tmp_path / "lora")
    line = run(export, monkeypatch, moved, tmp_path / "out")
    assert line.startswith("error: ") and "was trained on a model, which is not here: add --model DIR" in line
    assert run(export, monkeypatch, moved, tmp_path / "out", "--model", tiny_checkpoint()) is None


@pytest.mark.parametrize(
    "command, arguments, line",
    [
        (sample, ["{run}"], "say what to draw"),
        (sample, ["{here}/nowhere", "--prompt", "x"], "nowhere is no folder"),
        (sample, ["{here}", "--prompt", "x"], "holds no weights"),
        (sample, ["{run}", "--prompt", "x", "--set", "hight=3"], 'setting of a drawing "hight": did you mean "height"'),
        (sample, ["{run}", "--prompt", "x", "--set", "height"], "expected NAME=VALUE"),
        (sample, ["{run}", "--prompt", "x", "--set", "height=33"], "height=33"),
        (export, ["{model}", "{here}/out"], "is a whole model already"),
        (export, ["{run}", "{here}"], "is there already: name a new folder"),
    ],
)
def test_mistakes_are_one_line(tiny_run, tmp_path, monkeypatch, command, arguments, line):
    names = {"run": tiny_run, "here": tmp_path, "model": tiny_checkpoint()}
    said = run(command, monkeypatch, *(argument.format(**names) for argument in arguments))
    assert said.startswith("error: ") and line in said and "\n" not in said


def test_images_and_the_architecture_that_a_run_was_told(tmp_path):
    """A folder of Wan2.2-TI2V names the pipeline without images: a run that was told another draws as that."""
    model = tiny_checkpoint("WanPipeline")
    plain = Painter(find_weights(model), {"height": 32, "width": 32, "num_frames": 5}, "cpu")
    with pytest.raises(ValueError, match="WanPipeline draws from prompts alone"):
        plain.draw(["a cat"], [0], images=[[Image.new("RGB", (8, 8))]])
    told = {"actor_rollout_ref.model.architecture": "WanImageToVideoPipeline"}
    weights = SimpleNamespace(model=model, setting=lambda name, default=None: told.get(name, default))
    assert plain._model_config(weights, {}).architecture == "WanImageToVideoPipeline"
