"""A checkpoint knows which run wrote it: what another command would change is said before any worker starts."""

import functools
import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray
from composed import composed
from e2e_runs import prompts
from e2e_runs import settings as run_settings
from safetensors.torch import load_file, save_file
from tiny_models import tiny_checkpoint

from verl_omni.config.knob import walk
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.trainer import main_diffusion
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.failures import users_mistake
from verl_omni.trainer.run_folder import record as run_record
from verl_omni.trainer.run_folder.checkpointing import publish
from verl_omni.trainer.run_folder.resuming import plan_start

A = "actor_rollout_ref."
STEPS = 3


class RayStarted(BaseException):
    """No error of a run, which would be told in one line."""


def config(*overrides: str):
    first = (f"{A}model.lora_rank=4", "reward.custom_reward_function.path=reward.py", "trainer.device=cpu")
    return composed(*run_settings("run", *first, *overrides))


@functools.cache
def first_record():
    return run_record.describe(prepare_config(config()))


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    """A folder with a finished run of three steps; Ray does not start."""

    def no_ray(*args, **kwargs):
        raise RayStarted

    ray.shutdown()  # one that a test before left running would be used
    monkeypatch.setattr("ray.init", no_ray)
    monkeypatch.setattr("verl_omni.utils.external_lib.registrations", {})  # of other tests in this process
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def compute_score(image, gain=1):\n    return 0.5\n")
    with publish(tmp_path / "run", STEPS, first_record()) as writing:
        (writing / "trainer.json").write_text('{"data": {}}')
    (tmp_path / "run/config.yaml").write_text("of the first start")
    return tmp_path


def start(*overrides: str) -> None:
    main_diffusion.run_diffusion(config(*overrides))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_same_command_again_says_that_it_is_finished(run, capsys):
    before = files(run)
    start()
    assert "The run in run is finished: all 3 steps are done, and nothing was changed." in capsys.readouterr().out
    assert files(run) == before


def other_model(folder: Path) -> str:
    """The same shapes, and one weight of them differs."""
    shutil.copytree(tiny_checkpoint(), folder / "model")
    path = folder / "model/transformer/diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    next(iter(weights.values())).flatten()[0] += 1
    path.unlink()
    save_file(weights, path)
    return f"{A}model.path={folder}/model"


def other_prompts(folder: Path) -> str:
    """As many, in another order."""
    rows = pq.read_table(prompts() / "train.parquet")
    pq.write_table(rows.take(list(range(len(rows)))[::-1]), folder / "other.parquet")
    return f"data.train_files={folder}/other.parquet"


def other_reward(folder: Path) -> str:
    (folder / "reward.py").write_text("def compute_score(image):\n    return 0.25\n")
    return "recipe=null"


REFUSED = {
    "algorithm": (f"{A}model.algorithm=mix_grpo", f"{A}model.algorithm: flow_grpo -> mix_grpo"),
    "base model": (other_model, "/model, with other content"),
    "data": (other_prompts, "/other.parquet, with other content"),
    "optimizer": (f"{A}actor.optim.optimizer=NAdam", f"{A}actor.optim.optimizer: AdamW -> NAdam"),
    "alpha": (f"{A}model.lora_alpha=32", f"{A}model.lora_alpha: 64 -> 32"),
    "n": (f"{A}rollout.n=8", f"{A}rollout.n: 4 -> 8"),
    "reward file": (other_reward, "reward.py has other content"),
    "reward's arguments": (
        "++reward.custom_reward_function.reward_kwargs.gain=2",
        "reward.custom_reward_function.reward_kwargs: {} -> {'gain': 2}",
    ),
    "reward of the data": (
        "reward.custom_reward_function.path=null",
        "reward.py -> null, with other content",
    ),
    "loss": (f"{A}actor.diffusion_loss.clip_ratio=0.5", f"{A}actor.diffusion_loss.clip_ratio: "),
    "seed": (f"{A}rollout.seed=7", f"{A}rollout.seed: 0 -> 7"),
    "image size": (f"{A}rollout.pipeline.height=64", f"{A}rollout.pipeline.height: 32 -> 64"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_run_is_refused(run, name):
    change, said = REFUSED[name]
    override = change(run) if callable(change) else change
    before = files(run)
    with pytest.raises(ValueError) as caught:
        plan_start(prepare_config(config(override)), total_steps=5)
    line = users_mistake(caught.value)
    assert said in line and "trainer.resume_changes=allow" in line and "global_step_3" in line
    assert files(run) == before


def test_a_user_can_allow_it_or_start_anew(run):
    change, longer = f"{A}rollout.n=8", "trainer.total_training_steps=5"
    for way in ("trainer.resume_changes=allow", "trainer.resume_mode=disable"):
        with pytest.raises(RayStarted):
            start(change, longer, way)
    optimizer = (f"{A}actor.optim.optimizer=NAdam", longer, "trainer.resume_changes=allow")
    with pytest.raises(ValueError, match="to start the new one fresh, add .*load_contents"):
        start(*optimizer)
    with pytest.raises(RayStarted):
        start(*optimizer, f"{A}actor.checkpoint.load_contents=[model,extra]")


def test_what_may_change_is_said(run, capsys):
    with pytest.raises(RayStarted):
        start(f"{A}actor.optim.lr=0.5", "trainer.total_training_steps=5", "trainer.save_freq=2")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Changed since")]
    for said in ("optim.lr: 0.0001 -> 0.5", "trainer.total_training_steps: 3 -> 5", "trainer.save_freq: -1 -> 2"):
        assert said in line


def test_files_that_only_moved_are_the_same(run, capsys):
    shutil.copytree(tiny_checkpoint(), run / "copy")
    (run / "copy/README.md").write_text("a copy")
    shutil.move(run / "reward.py", run / "score.py")
    start(f"{A}model.path={run}/copy", f"reward.custom_reward_function.path={run}/score.py")
    assert "is finished" in (out := capsys.readouterr().out) and "Changed" not in out


def test_fewer_steps_than_were_done(run):
    with pytest.raises(ValueError, match="has 3 steps behind it, more than the 2 of this command"):
        start("trainer.total_training_steps=2")


def test_validation_asks_only_for_the_same_model(run):
    with pytest.raises(RayStarted):
        start("trainer.val_only=true", f"{A}rollout.n=8", other_reward(run), "data.train_files=null")
    with pytest.raises(ValueError, match="lora_alpha: 64 -> 32"):
        start("trainer.val_only=true", f"{A}model.lora_alpha=32")


def test_a_knob_that_is_younger_than_the_checkpoint(run):
    """An update adds and drops knobs: those that keep their default are no change."""
    record = run_record.describe(prepare_config(config()))
    older = json.loads(json.dumps(record))
    del older["settings"][f"{A}rollout.algo.same_initial_noise"], older["settings"]["trainer.seed"]
    older["settings"]["trainer.gone"] = 1
    assert "trainer.seed" not in run_record.changes(older, record)[1]
    record["settings"]["trainer.seed"] = 5
    assert run_record.changes(older, record)[1]["trainer.seed"] == "trainer.seed: 0 -> 5"


def test_a_knob_that_had_another_name_when_the_checkpoint_was_written(run):
    name, earlier = f"{A}actor.engine.dtype", f"{A}actor.fsdp_config.dtype"
    record = run_record.describe(prepare_config(config(f"{name}=bfloat16")))
    older = json.loads(json.dumps(record))
    older["settings"][earlier] = older["settings"].pop(name)
    assert run_record.changes(older, record) == ({}, {})
    older["settings"][earlier] = "float32"
    assert run_record.changes(older, record)[1] == {name: f"{name}: float32 -> bfloat16"}


def test_every_pattern_names_a_knob():
    names = [name for name, *_ in walk(DiffusionTrainerConfig)]
    for pattern in (*run_record.NOT_COMPARED, *run_record.CONTENT):
        assert any(fnmatchcase(name, pattern) for name in names), pattern


def test_large_files_count_with_pieces_from_all_over(tmp_path):
    path, size = tmp_path / "weights", run_record.WHOLE_BYTES + 12345
    seen = set()
    for place in (None, 0, size // 2, size - 2**18):
        content = bytearray(size)
        if place is not None:
            content[place : place + 2**18] = b"1" * 2**18  # a layer that was trained on
        path.write_bytes(content)
        seen.add(run_record.digest(str(path)))
    assert len(seen) == 4


def test_what_a_link_to_a_folder_holds_counts(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/weights").write_text("1")
    (tmp_path / "model/transformer").symlink_to("../elsewhere")
    before = run_record.digest(str(tmp_path / "model"))
    (tmp_path / "elsewhere/weights").write_text("2")
    assert run_record.digest(str(tmp_path / "model")) != before


def test_a_secret_that_an_earlier_version_wrote_is_no_change():
    known = {"settings": {"reward.custom_reward_function.reward_kwargs": {"X-Api-Key": "q"}}, "content": {}}
    now = {"settings": {"reward.custom_reward_function.reward_kwargs": {"X-Api-Key": "***"}}, "content": {}}
    assert run_record.changes(known, now) == ({}, {})
