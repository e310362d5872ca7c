import dataclasses
import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from diffusers import QwenImagePipeline

from verl_omni.pipelines.utils import weights_in
from verl_omni.quickstart import __main__ as quickstart
from verl_omni.quickstart import checkpoint, task
from verl_omni.quickstart.__main__ import typed_python
from verl_omni.quickstart.checkpoint import Recipe, build_checkpoint, held_out_scores
from verl_omni.quickstart.data import write_data
from verl_omni.quickstart.made import made_whole
from verl_omni.rewards.scorers.ocr import compute_score_ocr_line

SHORT = Recipe(images_per_number=1, vae_steps=2, vae_batch=2, transformer_steps=2, transformer_batch=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_checkpoint(tmp_path_factory.mktemp("quickstart") / "model", SHORT)


def weights(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


def test_split_covers_all_numbers_once():
    train, held_out = task.split_numbers()
    assert (len(train), len(held_out)) == (800, 200)
    assert sorted(train + held_out) == [f"{n:03d}" for n in range(1000)]
    assert task.split_numbers() == (train, held_out)


def test_signs_are_dark_numbers_on_light_ground():
    rng = np.random.default_rng(0)
    signs = [task.draw_sign("407", rng) for _ in range(50)]
    assert {(sign.shape, sign.dtype) for sign in signs} == {((16, 32, 3), np.dtype("uint8"))}
    border = np.stack(signs)[:, [0, -1]].mean()
    assert border > 195 and all(sign.min() < 130 for sign in signs)
    assert np.array_equal(task.draw_sign("407", np.random.default_rng(0)), signs[0])


def test_a_run_has_one_folder(tmp_path, monkeypatch, capsys):
    """Named by --run, or by the setting that a training has for it."""
    ran = []
    monkeypatch.setattr(quickstart, "train", lambda command: ran.append(command) or 1)
    arguments = ["verl-omni quickstart", "--out", str(tmp_path), f"trainer.default_local_dir={tmp_path / 'mine'}"]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit):
        quickstart.main()
    assert ran[0][-1] == arguments[-1]
    monkeypatch.setattr("sys.argv", [*arguments, "--run", "other"])
    with pytest.raises(SystemExit):
        quickstart.main()
    assert "both name the run's folder: leave one out" in capsys.readouterr().err and len(ran) == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/metrics.jsonl").touch()
    monkeypatch.setattr("sys.argv", [*arguments[:-1], "trainer.default_local_dir=~/mine"])
    monkeypatch.setattr(quickstart, "train", lambda command: 0)
    with pytest.raises(ValueError, match=r"mine/metrics.jsonl is empty"):  # it is looked for where it is
        quickstart.main()


def test_without_metrics_there_is_nothing_to_report(tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "train", lambda command: 0)
    monkeypatch.setattr("sys.argv", ["verl-omni quickstart", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="let trainer.logger have jsonl"):
        quickstart.main()


def test_the_ocr_reads_the_signs():
    pytest.importorskip("rapidocr")
    rng = np.random.default_rng(0)
    numbers = task.split_numbers()[1][:40]
    results = compute_score_ocr_line([task.draw_sign(number, rng) for number in numbers], numbers)
    assert np.mean([result["exact"] for result in results]) > 0.95


def test_prompts_in_verls_layout(tmp_path):
    for path, split, numbers in zip(write_data(tmp_path), ("train", "val"), task.split_numbers(), strict=True):
        assert path == tmp_path / f"{split}.parquet"
        rows = pq.read_table(path).to_pylist()
        assert [row["reward_model"] for row in rows] == [{"style": "rule", "ground_truth": n} for n in numbers]
        assert rows[3] == {
            "data_source": "ocr_line",
            "prompt": [{"role": "user", "content": f'a sign that reads "{numbers[3]}"'}],
            "reward_model": {"style": "rule", "ground_truth": numbers[3]},
            "extra_info": {"split": split, "index": 3},
        }


def test_stock_diffusers_draws_from_the_folder(folder):
    pipeline = QwenImagePipeline.from_pretrained(folder, **weights_in(torch.float32))
    pipeline.set_progress_bar_config(disable=True)
    embeds, mask = pipeline.encode_prompt([task.prompt_for("407"), task.prompt_for("083")])
    # a, sign, that, reads, quote, three digits, quote, end, newline, start, assistant, newline
    assert embeds.shape == (2, 14, 64) and mask is None
    image = pipeline(task.prompt_for("407"), height=16, width=32, num_inference_steps=2, output_type="np").images[0]
    assert image.shape == (16, 32, 3) and np.isfinite(image).all()


def test_latents_are_standardised_by_the_config(folder):
    """Encoding training signs and normalising with the config, as the pipelines do, gives mean 0 and deviation 1."""
    vae = QwenImagePipeline.from_pretrained(folder, **weights_in(torch.float32)).vae
    rng = np.random.default_rng(SHORT.seed)
    signs = np.stack([task.draw_sign(number, rng) for number in task.split_numbers()[0]])
    images = torch.from_numpy(signs).permute(0, 3, 1, 2)[:, :, None] / 127.5 - 1
    with torch.no_grad():
        latents = vae.encode(images).latent_dist.mean
    mean, std = (
        torch.tensor(value).view(1, -1, 1, 1, 1) for value in (vae.config.latents_mean, vae.config.latents_std)
    )
    normalised = (latents - mean) / std
    assert normalised.mean((0, 2, 3, 4)).abs().max() < 5e-3  # weights are saved in float16
    assert (normalised.std((0, 2, 3, 4)) - 1).abs().max() < 5e-3


def test_same_recipe_gives_the_same_weights(folder, tmp_path):
    torch.manual_seed(99)
    assert weights(build_checkpoint(tmp_path / "again", SHORT)) == weights(folder)


def test_the_shipped_checkpoint_is_the_recipes():
    """Its weights cannot be made again in a test; what they were made with, and their shapes, can be compared."""
    assert json.loads((task.CHECKPOINT / "recipe.json").read_text()) == dataclasses.asdict(Recipe())
    shipped, fresh = QwenImagePipeline.from_pretrained(task.CHECKPOINT), checkpoint._untrained_pipeline()
    for part in ("transformer", "vae", "text_encoder"):
        ours, theirs = ({k: v.shape for k, v in getattr(p, part).state_dict().items()} for p in (shipped, fresh))
        assert ours == theirs
    assert sum(file.stat().st_size for file in task.CHECKPOINT.rglob("*") if file.is_file()) < 6e6


def test_the_shipped_checkpoint_leaves_something_to_learn():
    pytest.importorskip("rapidocr")
    assert 0.4 < np.mean([result["score"] for result in held_out_scores(task.CHECKPOINT)]) < 0.55


def test_a_broken_save_leaves_no_checkpoint(tmp_path, monkeypatch):
    class Broken:
        def to(self, dtype):
            return self

        def save_pretrained(self, out):
            out.mkdir(parents=True)
            raise OSError("disk full")

    monkeypatch.setattr(checkpoint, "_train", lambda recipe, device: Broken())
    with pytest.raises(OSError, match="disk full"):
        build_checkpoint(tmp_path / "model", SHORT)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_appears_meanwhile_is_not_overwritten(tmp_path):
    """And what was made, perhaps in hours, is not lost."""
    with pytest.raises(FileExistsError, match="has appeared meanwhile: what was made is in .*unfinished"):
        with made_whole(tmp_path / "model") as folder:
            for place in (folder, tmp_path / "model"):
                place.mkdir()
                (place / "weights").write_text(place.name)
    assert (folder / "weights").read_text() == folder.name and (tmp_path / "model/weights").read_text() == "model"


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="choose another folder"):
        build_checkpoint(tmp_path, SHORT)
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("running", "on_path", "typed"),
    [
        ("{here}/.venv/bin/python", "{here}/.venv/bin/python", "python"),  # activated
        ("{here}/.venv/bin/python", "/usr/bin/python", ".venv/bin/python"),
        ("/opt/env/bin/python", None, "/opt/env/bin/python"),
    ],
)
def test_the_command_that_is_shown_runs_as_it_stands(running, on_path, typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", running.format(here=tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: on_path and on_path.format(here=tmp_path))
    assert typed_python() == typed
