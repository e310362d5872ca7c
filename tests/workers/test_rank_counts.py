"""One rank and two give the same loss, gradients and weights; a checkpoint of two ranks loads on one."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from engine_cases import (
    PROMPTS,
    add_reference,
    assert_same,
    disturb,
    gradients,
    loss_function,
    make_engine,
    make_rollout,
    model_config,
    moved,
    part,
    requests,
    roll_out,
    update,
    weights,
    whole,
)
from ranks import start_ranks
from safetensors.torch import load_file
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine import checkpoint_io

EMA = 0.9
SCHEDULE = {"lr_scheduler_type": "linear", "total_training_steps": 5, "lr_warmup_steps": 1}
CASES = {"full": False, "lora": True}
WEIGHED = ("tempflow_grpo", "flash_grpo", "opd")  # losses whose pairs count by their step
SD3 = "StableDiffusion3Pipeline"  # its timesteps go up to 1000, where bfloat16 tells only multiples of 4 apart


def build(path: str, lora: bool):
    """On several ranks weights and optimizer state are away between stages, which must not change anything either."""
    away = dist.get_world_size() > 1
    engine = make_engine(
        model_config(path, cfg=True, lora=lora), SCHEDULE, param_offload=away, optimizer_offload=away
    )
    engine.keep_reference()
    engine.keep_ema(EMA)
    engine.micro_batch_size = 5
    return engine


def ema(engine) -> dict[str, torch.Tensor]:
    copies = engine.policies.state_dict()["ema"]
    return {n: whole(checkpoint_io._like(copies[n], engine.parameters[n])) for n in copies}


def means(data: dict[str, torch.Tensor], dtype: str) -> torch.Tensor:
    engine = make_engine(model_config(tiny_checkpoint(SD3)), dtype=dtype)
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]["prev_sample_mean"].unflatten(0, data["all_timesteps"].shape)


def shares(data: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of two samples, one of them with a single step left: where there are two ranks, the second has nothing."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kept = torch.zeros(len(data["all_timesteps"]) * ranks, data["all_timesteps"].shape[1], dtype=torch.float64)
    kept[0], kept[2, 1] = 1, 1
    return kept[rank::ranks] * ranks / kept.sum()


def watch_gradients(engine) -> list[int]:
    """Before each micro-batch: how many numbers of gradients a rank holds whole, which wait for the last backward."""
    held, begin = [], engine.begin_micro_batch

    def begun(last: bool) -> None:
        groups = [group for module in engine._shards for group in module._get_fsdp_state()._fsdp_param_groups]
        gathered = [p._unsharded_param for group in groups for p in group.fsdp_params if hasattr(p, "_unsharded_param")]
        held.append(sum(p.grad.numel() for p in gathered if p.grad is not None))
        begin(last)

    engine.begin_micro_batch = begun
    return held


def in_8_bits(engine, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What each rank draws with all of the weights, and the reference's means of the rows that it has."""
    rollout = make_rollout(engine)
    with engine.eval_mode(), engine.whole("fp8"):
        images = [answer.trajectory for answer in rollout.run_batch(requests(rollout, PROMPTS, keep_trajectory=True))]
    with engine.eval_mode(), engine.policy("reference"), engine.in_precision("fp8"):
        means = engine.infer_batch(data)["model_output"]["prev_sample_mean"]
    return {"drawn": torch.stack([image["final_latents"] for image in images]), "reference": means[:1]}


def taught(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Means of a teacher that is somewhat beside the reference."""
    return {"teacher_prev_sample_mean": data["ref_prev_sample_mean"] + 0.01 * data["all_latents"][:, 1:]}


def observe(engine, data: dict[str, torch.Tensor], checkpoint: Path) -> dict:
    """Everything that must not depend on the number of ranks."""
    drawn = in_8_bits(engine, data)
    add_reference(engine, data)
    loss = loss_function(kl=0.1)
    held = watch_gradients(engine)
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss)
        seen = {"gradients": gradients(engine), "held whole": list(held), "in 8 bits": drawn}
        for name in WEIGHED:
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data | taught(data), loss_function(name=name))
            seen[name] = gradients(engine)
        engine.optimizer_zero_grad()
        rejected = engine.forward_backward_batch(data | {"share": shares(data)}, loss)
        seen |= {"of what is kept": gradients(engine), "metrics of what is kept": [rejected["metrics"]]}
    seen["metrics"] = update(engine, data, loss)
    seen["weights"], seen["ema"] = weights(engine), ema(engine)
    engine.save_checkpoint(str(checkpoint))
    seen["later_metrics"] = update(engine, data, loss)
    seen["later_weights"] = weights(engine)
    return seen


def rank_main(rank: int, folder: str, path: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    for name, lora in CASES.items():
        data = torch.load(os.path.join(folder, f"{name}.pt"))
        seen = observe(build(path, lora), part(data, slice(rank, None, 2)), Path(folder, f"{name}_of_two"))
        if rank == 0:
            torch.save(seen, os.path.join(folder, f"{name}_seen.pt"))
    seen = means(part(torch.load(os.path.join(folder, "sd3.pt")), slice(rank, None, 2)), "bfloat16")
    torch.save(seen, os.path.join(folder, f"sd3_seen_{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Per case: the batch, what one rank saw, what two ranks saw, and the folder of the checkpoints."""
    folder, path = tmp_path_factory.mktemp("ranks"), str(tiny_checkpoint())
    found = {}
    for name, lora in CASES.items():
        data = roll_out(make_engine(model_config(path, cfg=True, lora=lora)))
        torch.save(data, folder / f"{name}.pt")
        found[name] = (data, observe(build(path, lora), dict(data), folder / f"{name}_of_one"))
    torch.save(roll_out(make_engine(model_config(tiny_checkpoint(SD3)))), folder / "sd3.pt")
    start_ranks(rank_main, args=(str(folder), path))
    return {name: (*found[name], torch.load(folder / f"{name}_seen.pt"), folder) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_one_and_two_ranks_agree(runs, name):
    _, one, two, _ = runs[name]
    for key in ("metrics", "later_metrics", "metrics of what is kept"):
        for ours, theirs in zip(one[key], two[key], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert one["metrics"][1]["kl_loss"] > 0
    for key in ("gradients", "of what is kept", "weights", "ema", "later_weights", *WEIGHED):
        assert_same(one[key], two[key])
    for key in WEIGHED:
        assert moved(one[key], one["gradients"]) > 1e-4, "the loss is another"
    assert_same(one["in 8 bits"], two["in 8 bits"], atol=1e-3)
    assert max(g.abs().max() for g in one["gradients"].values()) > 1e-2
    assert len(two["held whole"]) > 1, "gradients are those of several micro-batches"
    assert max(two["held whole"]) > 0 if CASES[name] else max(two["held whole"]) == 0, "only a LoRA's wait, whole"
    assert moved(one["later_weights"], one["weights"]) > 1e-4


def test_two_ranks_round_no_worse_than_one_in_bfloat16(runs):
    """Were FSDP to cast inputs, the timestep would be off by up to 2, and the means five times as far."""
    folder = runs["full"][-1]
    data = torch.load(folder / "sd3.pt")
    exact, one = means(data, "float32"), means(data, "bfloat16")
    two = torch.stack([torch.load(folder / f"sd3_seen_{rank}.pt") for rank in range(2)], 1).flatten(0, 1)
    assert 0 < (two - exact).norm() < 1.5 * (one - exact).norm()


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(runs, name):
    data, _, two, folder = runs[name]
    data = dict(data)
    engine = build(str(tiny_checkpoint()), CASES[name])
    add_reference(engine, data)
    disturb(engine, scale=3.0)
    update(engine, data, loss_function(clip=10.0), steps=1)
    engine.load_checkpoint(str(folder / f"{name}_of_two"))
    assert_same(two["weights"], weights(engine), atol=0)
    assert_same(two["ema"], ema(engine), atol=0)
    metrics = update(engine, data, loss_function(kl=0.1))
    for ours, theirs in zip(metrics, two["later_metrics"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert_same(two["later_weights"], weights(engine))


def test_the_reference_is_what_the_folder_holds_and_no_checkpoint_has_it(runs):
    """After a resume the reference is still the model that training began with: it is not written again and again."""
    data, _, _, folder = runs["full"]
    fresh = build(str(tiny_checkpoint()), lora=False)
    expected, got = dict(data), dict(data)
    add_reference(fresh, expected)
    fresh.load_checkpoint(str(folder / "full_of_one"))
    assert moved(weights(fresh), weights(build(str(tiny_checkpoint()), lora=False))) > 1e-4
    add_reference(fresh, got)
    torch.testing.assert_close(got["ref_prev_sample_mean"], expected["ref_prev_sample_mean"], atol=0, rtol=0)
    held = {key for path in (folder / "full_of_one").rglob("*.safetensors") for key in load_file(path)}
    assert any(key.startswith("policies.ema.") for key in held)
    assert not any("reference" in key for key in held)


@pytest.mark.parametrize(("saved", "loaded"), [("lora", "full"), ("full", "lora")])
def test_a_checkpoint_of_another_kind_is_refused(runs, saved, loaded):
    engine = build(str(tiny_checkpoint()), CASES[loaded])
    before = weights(engine)
    with pytest.raises(ValueError, match="does not fit this run"):
        engine.load_checkpoint(str(runs[saved][3] / f"{saved}_of_one"))
    assert_same(before, weights(engine), atol=0)
