"""`reward.validation`: what scores the images of validation, and them alone."""

import io
import json

import pytest
from e2e_runs import back_to, metrics, run_here, settings
from PIL import Image
from refusals import refused

from verl_omni.report.run import Run
from verl_omni.report.summary import about
from verl_omni.testing.local_trainer import local_config
from verl_omni.trainer.run_folder.resuming import plan_start

OWN, VALIDATION = "reward.custom_reward_function", "reward.validation"
FUNCTIONS = """
def bright(image):
    return sum(image.convert("L").resize((2, 2)).getdata())

def better(image, other):
    return 0.5 if bright(image) == bright(other) else float(bright(image) > bright(other))

def ranks(images, prompts):
    return [float(sum(bright(one) > bright(other) for other in images)) for one in images]

def width_and_red(image, prompt, *, times=1):
    return {"score": times * image.getpixel((3, 5))[0], "width": image.width}
"""
FEW = (
    "actor_rollout_ref.rollout.pipeline.num_inference_steps=2", "actor_rollout_ref.actor.optim.lr=0.01",
    "trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=0",
)  # fmt: skip
IN_PAIRS = (f"{OWN}.name=better", "reward.pairwise.by=pair")
IN_GROUPS = (f"{OWN}.name=ranks", "reward.pairwise.by=group")
TRIPLE = (
    f"{VALIDATION}.custom_reward_function.path=reward.py", f"{VALIDATION}.custom_reward_function.name=width_and_red",
    f"{VALIDATION}.custom_reward_function.reward_kwargs={{times: 3}}",
)  # fmt: skip
JPEG = (f"{VALIDATION}.scorers=[{{name: jpeg_incompressibility, weight: 2}}]",)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "reward.py").write_text(FUNCTIONS)
    return tmp_path


def kilobytes(image: Image.Image) -> float:
    """As pillow writes it, which is what jpeg_incompressibility is."""
    file = io.BytesIO()
    image.save(file, format="JPEG", quality=95)
    return len(file.getvalue()) / 1000


SCORES = {TRIPLE: lambda image: 3 * image.getpixel((3, 5))[0], JPEG: lambda image: 2 * kilobytes(image)}


@pytest.mark.parametrize(("training", "validation"), [(IN_PAIRS, TRIPLE), (IN_GROUPS, JPEG)])
def test_a_run_that_compares_has_a_validation_curve(folder, monkeypatch, process_group, training, validation):
    """Its scores are those of the files; training learns what it would learn without a validation."""
    plain = settings("run", f"{OWN}.path=reward.py", *training, *FEW)
    best = ("trainer.keep_best=true", "trainer.save_freq=1")
    run_here([*plain, "trainer.default_local_dir=alone", "data.val_files=null"], folder, monkeypatch)
    run_here([*plain, *validation, *best], folder, monkeypatch)
    told, alone = metrics(folder / "run"), metrics(folder / "alone")
    means = {}
    for step in (0, 1, 2):
        place = folder / f"run/validation/step_{step}"
        rows = [json.loads(line) for line in (place / "samples.jsonl").read_text().splitlines()]
        for row in rows:
            assert row["score"] == pytest.approx(SCORES[validation](Image.open(place / row["image"])), abs=1e-4)
        means[step] = sum(row["score"] for row in rows) / len(rows)
        assert told[step]["val-core/jpeg_compressibility/reward/mean@1"] == pytest.approx(means[step])
    for step in (1, 2):
        assert {key: told[step][key] for key in alone[step]} == alone[step]
    assert told[2]["training/best_score"] == pytest.approx(max(means.values()))
    run = Run(folder / "run")
    assert (about(run).get("Reward of validation") == "width_and_red in reward.py") == (validation is TRIPLE)
    assert "validation reward" in (folder / "run/report.html").read_text()


def test_it_is_asked_without_comparisons_too(folder, monkeypatch, process_group):
    """Training by the rows' own reward; it may change where a run goes on, as it teaches nothing."""
    arguments = settings("run", *TRIPLE, *FEW, "trainer.save_freq=1")
    run_here(arguments, folder, monkeypatch)
    told = metrics(folder / "run")
    assert told[1]["critic/rewards/mean"] < 0 < told[1]["val-core/jpeg_compressibility/reward/mean@1"]
    assert told[1]["val-aux/jpeg_compressibility/width/mean@1"] == 32
    back_to(1, folder / "run")
    start = plan_start(local_config(settings("run", *JPEG, *FEW, "trainer.save_freq=1")), 2)
    assert start.step == 1 and any(f"{VALIDATION}.scorers" in line for line in start.notices)


def test_what_cannot_validate_is_refused_in_one_line(folder, monkeypatch):
    monkeypatch.chdir(folder)
    alone = refused("reward.pairwise.by=pair", "data.val_files=val.parquet")
    assert "name what scores that, such as 'reward.validation.scorers=" in alone
    for one in (*TRIPLE[:1], *JPEG):
        assert "has no effect with data.val_files=null" in refused(one, "data.val_files=null")
    training = (f"{OWN}.path=reward.py", *IN_PAIRS)
    for given, said in (
        ("scorers=[{name: jpg}]", 'reward.validation: unknown reward .*"jpg"'),
        ("scorers=[{name: jpeg_compressibility, quantity: 3}]", "reward.validation: .*quantity"),
        ("scorers=[{name: jpeg_compressibility, processes: 2}]", "jpeg_compressibility.processes has no effect"),
        ("custom_reward_function.path=nowhere.py", "reward.validation: .*there is no such file"),
        ("custom_reward_function={path: reward.py, name: better}", "reward.validation: .*compares two images"),
        ("custom_reward_function={path: reward.py, name: worse}", "reward.validation: unknown .* \"worse\""),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            local_config(settings("run", *training, f"{VALIDATION}.{given}"))
