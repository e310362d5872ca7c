"""The notebook of examples/, cell by cell: a whole run from Python."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

NOTEBOOK = Path(__file__).parents[2] / "examples/notebook/first_run.ipynb"


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What its names are when all cells have run."""
    names: dict = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("notebook"))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), cell["id"], "exec"), names)  # noqa: S102
        yield names


def test_the_run_was_rewarded_by_the_notebooks_own_function(left):
    run, redness = left["run"], left["redness"]
    images = run.images()
    scores = [row["val-core/prompts/reward/mean@1"] for row in run.metrics if "val-core/prompts/reward/mean@1" in row]
    assert len(images) == 2 and len(scores) == 3  # before, and after both steps
    assert scores[-1] == pytest.approx(sum(map(redness, images)) / 2, abs=1e-6)


def test_its_callback_was_called_here(left):
    rewards = [row["critic/rewards/max"] for row in left["run"].metrics if "critic/rewards/max" in row]
    assert left["best"].rewards == rewards and len(rewards) == 2


def test_what_the_run_is_in_a_notebook(left):
    run = left["run"]
    assert list(run.checkpoints) == [1, 2] and run.last == run.checkpoints[2] and run.best in run.checkpoints.values()
    shown = run._repr_html_()
    assert shown.count("data:image/png") == 2 and "a fox" in shown and run.report.is_file()


def test_it_draws_and_hands_on(left):
    assert [image.size for image in left["images"]] == [(32, 32)] * 4
    assert load_file(left["lora"] / "pytorch_lora_weights.safetensors")
