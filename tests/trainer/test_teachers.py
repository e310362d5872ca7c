"""Teachers: weights of a folder in the place of the trained ones, one for each data_source, alone or beside a loss."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from e2e_runs import metrics, run_here, settings
from preference_cases import make_batch, make_engine, weights
from ranks import start_ranks
from refusals import refused
from safetensors.torch import load_file
from tiny_models import tiny_checkpoint

from verl_omni.testing.local_trainer import local_config, local_trainer
from verl_omni.utils.arrays import object_array
from verl_omni.workers.engine.teachers import keep_teachers, teacher_name

TEACHER, MODEL = "actor_rollout_ref.actor.teacher", "actor_rollout_ref.model"


@pytest.fixture(scope="module")
def lora(tmp_path_factory, process_group):
    """A run's export: an adapter of rank 4 with alpha 8, away from where every student starts."""
    folder = tmp_path_factory.mktemp("teacher")
    engine = make_engine(tiny_checkpoint(), "awm", lora=True)
    engine.save_checkpoint(str(folder))
    return folder / "export"


def opd(folder, teacher, *overrides: str, algorithm: str = "opd") -> list[str]:
    return settings(
        folder / "run", f"{MODEL}.algorithm={algorithm}", f"{TEACHER}.path={teacher}", f"{MODEL}.lora_rank=4",
        f"{MODEL}.lora_alpha=8", "actor_rollout_ref.actor.optim.lr=0.01", "data.val_files=null",
        "trainer.save_freq=1", *overrides,
    )  # fmt: skip


@pytest.mark.parametrize(("algorithm", "metric"), [("opd", "teacher_kl"), ("opd_forward", "teacher_distance")])
def test_a_student_comes_closer_and_goes_on_bit_for_bit(tmp_path, monkeypatch, process_group, lora, algorithm, metric):
    arguments = opd(tmp_path, lora, algorithm=algorithm)
    run_here(arguments, tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    distance = [told[step][f"actor/{metric}"] for step in (1, 2, 3)]
    assert 0 < distance[2] < distance[0]
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"run/global_step_{step}")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("1")
    run_here(arguments, tmp_path, monkeypatch)
    assert metrics(tmp_path / "run") == told


@pytest.mark.parametrize("algorithm", ["opd", "opd_forward"])
def test_a_student_learns_from_what_an_earlier_one_drew(tmp_path, monkeypatch, process_group, lora, algorithm):
    metric = {"opd": "teacher_kl", "opd_forward": "teacher_distance"}[algorithm]
    more = ("trainer.mode=fully_async", "trainer.max_staleness=1", "trainer.val_before_train=false")
    run_here(opd(tmp_path, lora, *more, algorithm=algorithm), tmp_path, monkeypatch)
    told = metrics(tmp_path / "run")
    assert told[1]["staleness/max"] == 0 and told[2]["staleness/max"] == 1
    assert 0 < told[3][f"actor/{metric}"] < told[1][f"actor/{metric}"]


def test_each_row_has_the_teacher_of_its_source(tmp_path, monkeypatch, process_group, lora):
    """Two teachers, of which one is the student as it starts: there the divergence is 0."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "start"
    trainer = local_trainer(local_config(opd(tmp_path, lora)))
    trainer.actor_wg.worker.engine.save_checkpoint(str(own))
    both = local_trainer(local_config(opd(tmp_path, f"{{a: {lora}, b: {own / 'export'}}}")))
    from verl_omni.trainer.diffusion.prompts import PromptStream

    batch = both.start_sampling(PromptStream(both.train_loader).take(), 0)().batch
    batch.non_tensor_batch["data_source"] = object_array(["a", "b"] * 4)
    worker = both.actor_wg.worker
    taught = both._taught(batch)
    asked = both._for_training(taught)
    means = torch.stack(worker.trajectories.batch(asked)["teacher_prev_sample_mean"].rows)
    steps = worker._batch(asked)
    now = worker.engine.infer_batch(steps)["model_output"]["prev_sample_mean"].reshape(means.shape)
    apart = (means - now).flatten(1).abs().amax(dim=1)
    assert (apart[1::2] < 1e-5).all() and (apart[::2] > 1e-4).all()
    batch.non_tensor_batch["data_source"] = object_array(["a", "c"] * 4)
    with pytest.raises(ValueError, match="unknown data_source in actor_rollout_ref.actor.teacher.path .c."):
        both._taught(batch)


def test_on_the_forward_process_too(process_group, lora, tmp_path):
    engine = make_engine(tiny_checkpoint(), "awm", lora=True)
    engine.save_checkpoint(str(tmp_path))
    keep_teachers(engine, {"a": str(lora), "b": str(tmp_path / "export")})
    with torch.no_grad():
        for parameter in engine.policies.copies[teacher_name(0)].values():
            parameter.mul_(1.5)
    data = make_batch(engine) | {"teacher": torch.tensor([0, 1] * 3)}
    data = engine.before_update(data, {"teacher_velocity": "teacher", "old_velocity": "current"})
    apart = (data["teacher_velocity"] - data["old_velocity"]).flatten(1).abs().amax(dim=1)
    assert (apart[1::2] < 1e-5).all() and (apart[::2] > 1e-4).all()


def test_its_weights_are_those_of_the_folder(process_group, lora, tmp_path):
    engine = make_engine(tiny_checkpoint(), "awm", lora=True)
    student = weights(engine)
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.add_(1.0)
    keep_teachers(engine, {"one": str(lora), "other": str(lora)})
    assert not any(name.startswith("teacher") for name in engine.policies.state_dict())  # in no checkpoint
    with engine.policy(teacher_name(1)):
        assert all(torch.equal(value, student[name]) for name, value in weights(engine).items())
    engine.model_config.lora_alpha = 4  # the teacher's was 8
    keep_teachers(engine, str(lora))
    with engine.policy(teacher_name(0)):
        assert all(
            torch.equal(value, student[name] * (2 if ".lora_B." in name else 1))
            for name, value in weights(engine).items()
        )


def test_a_full_teacher_is_a_copy_of_the_weights(process_group):
    engine = make_engine(tiny_checkpoint(), "awm")
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.add_(1.0)
    keep_teachers(engine, str(tiny_checkpoint()))
    state = load_file(tiny_checkpoint() / "transformer/diffusion_pytorch_model.safetensors")
    with engine.policy(teacher_name(0)):
        assert all(torch.equal(value, state[name]) for name, value in weights(engine).items())


def rank_main(rank: int, folder: str, path: str, teacher: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "store"), 2))
    engine = make_engine(path, "awm", lora=True)
    student = weights(engine)
    with torch.no_grad():
        for parameter in engine.parameters.values():
            parameter.to_local().add_(1.0)
    keep_teachers(engine, teacher)
    with engine.policy(teacher_name(0)):
        assert all(torch.equal(value, student[name]) for name, value in weights(engine).items())
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_have_a_share_of_it_each(tmp_path, lora):
    start_ranks(rank_main, args=(str(tmp_path), str(tiny_checkpoint()), str(lora)))


def test_what_cannot_teach_is_refused_in_one_line(tmp_path):
    algorithm, lora = f"{MODEL}.algorithm=opd", f"{MODEL}.lora_rank=4"
    assert f"set {TEACHER}.path to the folder" in refused(algorithm)
    assert "is no folder" in refused(algorithm, f"{TEACHER}.path=/nowhere")
    assert "holds no LoRA weights" in refused(algorithm, lora, f"{TEACHER}.path={tmp_path}")
    assert "holds no transformer/*.safetensors" in refused(algorithm, f"{TEACHER}.path={tmp_path}")
    same = f"{TEACHER}.path={tiny_checkpoint()}"
    assert "coef=2.0 has no effect" in refused(algorithm, same, f"{TEACHER}.coef=2.0")
    assert "has no effect with actor_rollout_ref.actor.teacher.path=null" in refused(f"{TEACHER}.coef=2.0")
    assert "asks no teacher" in refused(f"{MODEL}.algorithm=awm", same)
    assert f"set {TEACHER}.path to the folder" in refused(f"{MODEL}.algorithm=opd_forward")
    offline = "algorithm.sample_source=offline"
    assert "of the student's own images" in refused(f"{MODEL}.algorithm=opd_forward", same, offline)
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint(), other)
    scheduler = other / "scheduler/scheduler_config.json"
    scheduler.write_text(json.dumps(json.loads(scheduler.read_text()) | {"shift_terminal": 0.3}))
    line = refused(algorithm, f"{TEACHER}.path={other}")
    assert "steps at other timesteps or sigmas than the trained model" in line
    sd3 = tiny_checkpoint("StableDiffusion3Pipeline")
    assert "is a SD3Transformer2DModel, and the trained model a QwenImageTransformer2DModel" in refused(
        algorithm, f"{TEACHER}.path={sd3}"
    )
