"""Teachers on devices of their own say what they say beside the student, and nothing is held twice."""

import json
import shutil

import diffusers
import pytest
import torch
from composed import composed
from e2e_runs import metrics, prompts, run_here, settings
from pyarrow import array
from pyarrow import parquet as pq
from refusals import prepared, refused
from safetensors.torch import load_file, save_file
from tiny_models import tiny_checkpoint
from verl.protocol import DataProto

from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.trainer.diffusion.teaching import check_rows_apart
from verl_omni.trainer.placement import TEACHERS, all_wanted
from verl_omni.utils.arrays import object_array
from verl_omni.workers.rollout.trajectories import COLUMN, TrajectoryRef

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
TEACHER, POOL = f"{ACTOR}.teacher", f"{ACTOR}.teacher.n_gpus_per_node"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
LORA = (f"{MODEL}.lora_rank=4", f"{MODEL}.lora_alpha=8")


@pytest.fixture(scope="module")
def moved(tmp_path_factory):
    """The tiny model with weights that were moved."""
    folder = tmp_path_factory.mktemp("moved") / "model"
    shutil.copytree(tiny_checkpoint(), folder)
    state, generator = load_file(folder / WEIGHTS), torch.Generator().manual_seed(3)
    save_file({k: v + 0.02 * torch.randn(v.shape, generator=generator) for k, v in state.items()}, folder / WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def deeper(tmp_path_factory):
    """A transformer of the family with a block more."""
    folder = tmp_path_factory.mktemp("deeper")
    config = json.loads((tiny_checkpoint() / "transformer/config.json").read_text())
    torch.manual_seed(0)
    kind = getattr(diffusers, config["_class_name"])
    kind.from_config(config | {"num_layers": config["num_layers"] + 1}).save_pretrained(folder / "transformer")
    return folder


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """Prompts of which every other one is of another data_source."""
    rows = pq.read_table(prompts() / "train.parquet")
    sources = array(["jpeg_compressibility", "jpeg_incompressibility"] * (len(rows) // 2))  # which are rewards too
    file = tmp_path_factory.mktemp("data") / "train.parquet"
    pq.write_table(rows.set_column(rows.column_names.index("data_source"), "data_source", sources), file)
    return file


def taught(run: str, *overrides: str) -> list[str]:
    return settings(run, f"{ACTOR}.optim.lr=0.01", "data.val_files=null", "trainer.total_training_steps=2", *overrides)


@pytest.mark.parametrize("case", ["opd", "opd_forward", pytest.param("separate", marks=pytest.mark.slow)])
def test_every_number_is_that_of_teachers_beside_the_student(
    case, tmp_path, monkeypatch, process_group, moved, deeper, two_sources
):
    both = f"{{jpeg_compressibility: {moved}, jpeg_incompressibility: {deeper}}}"
    several = [f"{TEACHER}.path={both}", f"data.train_files={two_sources}"]
    how = {
        "opd": [f"{MODEL}.algorithm=opd", *several, *LORA],
        "opd_forward": [f"{MODEL}.algorithm=opd_forward", *several, f"{ACTOR}.shuffle=true"],  # all weights
        "separate": [f"{MODEL}.algorithm=flow_grpo", f"{TEACHER}.path={moved}", *LORA, "trainer.mode=separate"],
    }[case]
    run_here(taught("beside", *how), tmp_path, monkeypatch)
    run_here(taught("apart", *how, f"{POOL}=1"), tmp_path, monkeypatch)
    beside, apart = metrics(tmp_path / "beside"), metrics(tmp_path / "apart")
    assert apart == beside
    metric = {"opd_forward": "teacher_distance"}.get(case, "teacher_kl")
    assert beside[1][f"actor/{metric}"] > 0


def test_the_student_is_held_here_and_the_teacher_there(tmp_path, monkeypatch, process_group, moved):
    """A training worker knows no teacher. One of its samples goes there with what a forward needs, and no more."""
    from verl_omni.trainer.diffusion.prompts import PromptStream

    monkeypatch.chdir(tmp_path)
    given = taught("run", f"{MODEL}.algorithm=opd", f"{TEACHER}.path={moved}", *LORA, f"{POOL}=1")
    trainer = local_trainer(local_config(given))
    training, teaching = trainer.actor_wg.worker, trainer.teachers.workers.worker
    assert not training.engine.models and not training.engine.policies.copies
    state = load_file(moved / WEIGHTS)
    held = dict(teaching.engine.module.named_parameters())
    assert held.keys() == state.keys() and all(torch.equal(held[name], state[name]) for name in held)
    asked = []
    monkeypatch.setattr(teaching, "teach", lambda rows, teach=teaching.teach: (asked.append(rows), teach(rows))[1])
    experience = trainer.start_sampling(PromptStream(trainer.train_loader).take(), 0)()
    batch = trainer._taught(experience.scored({}))
    (lent,) = asked
    first = lent.non_tensor_batch[COLUMN][0].stored.result()
    assert {"all_latents", "prompt_embeds"} <= first.keys()
    assert not {"uncond_velocity", "old_prev_sample_mean", "final_latents"} & first.keys()
    assert teaching.trajectories.rows == {}
    assert [reference.more.result().keys() for reference in batch.non_tensor_batch[COLUMN]] == [
        {"teacher_prev_sample_mean"}
    ] * len(batch)


def test_their_devices_are_counted():
    pool = (f"{TEACHER}.path=x", f"{POOL}=2", f"{TEACHER}.nnodes=3")
    (wanted,) = (one for one in all_wanted(composed("trainer.device=cuda", *pool)) if one.name == TEACHERS)
    assert (wanted.on_nodes, wanted.gpus, wanted.apart) == ((2, 2, 2), 1, True)
    names = {one.name for one in all_wanted(composed("trainer.device=cuda", *pool, "trainer.val_only=true"))}
    assert TEACHERS not in names  # nobody would ask them


def test_a_sample_in_two_rows_has_no_place_for_two_answers():
    rows = [TrajectoryRef(name) for name in ("a", "b", "a")]
    check_rows_apart(DataProto(non_tensor_batch={COLUMN: object_array(rows[:2])}))
    with pytest.raises(ValueError, match="a sample in several rows.*leave .*teacher.n_gpus_per_node out"):
        check_rows_apart(DataProto(non_tensor_batch={COLUMN: object_array(rows)}))


def test_what_cannot_be_held_apart_is_refused_in_one_line(tmp_path, moved):
    opd, own = f"{MODEL}.algorithm=opd", f"{TEACHER}.path={moved}"
    assert f"has no effect with {TEACHER}.path=null" in refused(f"{POOL}=1")
    assert f"has no effect with {POOL}=null" in refused(opd, own, f"{TEACHER}.nnodes=2")
    (tmp_path / "pytorch_lora_weights.safetensors").touch()
    line = refused(opd, f"{TEACHER}.path={{a: {moved}, b: {tmp_path}}}", *LORA, f"{POOL}=1")
    assert f"{tmp_path} is an adapter, which costs the training workers no second model: leave it out" in line
    line = refused(opd, own, f"{POOL}=3", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=4")
    assert "= 16 images do not divide among the 3 devices" in line
    dealt = (f"{MODEL}.algorithm=opd_forward", own, f"{POOL}=3", "data.train_batch_size=4")
    assert prepared(*dealt, "actor_rollout_ref.rollout.n=4")  # there rows are dealt, and some fill up
    assert "=fsdp2, and not by veomni" in refused(opd, own, f"{POOL}=1", f"{ACTOR}.strategy=veomni")
    auto = f"{ACTOR}.ppo_micro_batch_size_per_gpu=auto"
    assert "ref.log_prob_micro_batch_size_per_gpu for the teachers" in refused(opd, own, f"{POOL}=1", auto)
