"""However weights lie on the ranks, training is the same; and a checkpoint goes on with any other number and layout."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from engine_cases import assert_same, loss_function, make_engine, model_config, moved, part, roll_out, update, weights
from ranks import start_ranks
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine import export

pytestmark = pytest.mark.timeout(240)

AWAY = {"param_offload": True, "optimizer_offload": True}
# (ranks that hold one copy of the weights, where weights are between stages, gradient checkpointing, LoRA)
LAYOUTS = {
    "shared by all": (-1, {}, False, False),
    "two copies": (2, {}, False, False),
    "four copies, away, recomputed": (1, AWAY, True, False),
    "LoRA, two copies, away, recomputed": (2, AWAY, True, True),
}
ON_FOUR = [name for name in LAYOUTS if name != "shared by all"]
EMA = 0.9
SHARED, COPIES, LORA_COPIES = "shared by all", "two copies", "LoRA, two copies, away, recomputed"


def build(path: str, layout: str, strategy: str = "fsdp2"):
    size, away, recomputes, lora = LAYOUTS[layout]
    model = model_config(path, lora=lora, enable_gradient_checkpointing=recomputes)
    size = size if dist.get_world_size() > 1 else -1
    engine = make_engine(model, strategy=strategy, fsdp_size=size, **away)
    engine.keep_ema(EMA)
    engine.micro_batch_size = 6
    return engine


def steps_of(engine, data: dict[str, torch.Tensor], steps: int) -> list[tuple[dict[str, float], dict]]:
    """(metrics, weights) of each, on this rank's share of the rows."""
    own = part(data, slice(dist.get_rank(), None, dist.get_world_size()))
    return [(*update(engine, own, loss_function(), 1), weights(engine)) for _ in range(steps)]


def one_more(
    path: str,
    layout: str,
    data: dict[str, torch.Tensor],
    before: Path | None,
    after: Path,
    behind: bool = False,
    strategy: str = "fsdp2",
) -> list:
    """From one checkpoint to the next."""
    engine = build(path, layout, strategy)
    if before is not None:
        engine.load_checkpoint(str(before))
    done = steps_of(engine, data, 1)
    engine.checkpoint_config.async_save = behind
    engine.save_checkpoint(str(after))
    if behind:  # what is written is of this moment, whatever is trained meanwhile
        steps_of(engine, data, 1)
        assert engine.checkpoint_written(wait=True)
    return done


def rank_main(
    rank: int,
    world: int,
    folder: str,
    path: str,
    layouts: list[str],
    layout: str,
    stage: int,
    strategy: str = "fsdp2",
) -> None:
    torch.set_num_threads(1)
    export.FILE_BYTES = 20_000  # several files: each rank writes some
    folder = Path(folder)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(str(folder / f"{world}"), world))
    data = {lora: torch.load(folder / f"{lora}.pt") for lora in (False, True)}
    seen = {name: steps_of(build(path, name, strategy), data[LAYOUTS[name][3]], 2) for name in layouts}
    before, after = folder / f"after_{stage - 1}", folder / f"after_{stage}"
    own = data[LAYOUTS[layout][3]]
    seen["resumed"] = one_more(path, layout, own, before, after, behind=True, strategy=strategy)
    if rank == 0:
        torch.save(seen, folder / f"seen_by_{world}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, steps of one rank with all weights and with LoRA, of four in each layout, of the stages 1 2 4 1)."""
    folder, path = tmp_path_factory.mktemp("layouts"), str(tiny_checkpoint())
    alone = {}
    for lora in (False, True):
        layout = next(name for name, (*_, with_lora) in LAYOUTS.items() if with_lora == lora)
        data = roll_out(make_engine(model_config(path, lora=lora)))
        torch.save(data, folder / f"{lora}.pt")
        alone[lora] = steps_of(build(path, layout), data, 2 if lora else 4)
    data = torch.load(folder / "False.pt")
    stages = one_more(path, SHARED, data, None, folder / "after_1")
    start_ranks(rank_main, (2, str(folder), path, [], SHARED, 2), ranks=2)
    start_ranks(rank_main, (4, str(folder), path, ON_FOUR, COPIES, 3), ranks=4)
    two, four = (torch.load(folder / f"seen_by_{world}.pt") for world in (2, 4))
    stages += two["resumed"] + four["resumed"]
    stages += one_more(path, SHARED, data, folder / "after_3", folder / "after_4")
    return folder, alone, four, stages


def assert_same_steps(ours: list, theirs: list) -> None:
    for (metrics, found), (expected_metrics, expected) in zip(ours, theirs, strict=True):
        assert metrics == pytest.approx(expected_metrics, rel=1e-4, abs=1e-5)
        assert_same(found, expected)


@pytest.mark.parametrize("layout", ON_FOUR)
def test_four_ranks_train_as_one_does(runs, layout):
    _, alone, four, _ = runs
    expected = alone[LAYOUTS[layout][3]][:2]
    assert moved(expected[1][1], expected[0][1]) > 1e-4
    assert_same_steps(four[layout], expected)


def test_a_run_goes_on_with_2_then_4_then_1_rank(runs):
    _, alone, _, stages = runs
    assert_same_steps(stages, alone[False])


def test_an_export_of_several_ranks_is_a_model_of_diffusers(runs):
    check_export(runs[0] / "after_3")


def check_export(checkpoint: Path) -> None:
    """Several ranks wrote it: in several files, the average, under the class's own name."""
    exported = checkpoint / "export/transformer"
    assert len(list(exported.glob("*.safetensors"))) > 4
    assert json.loads((exported / "config.json").read_text())["_class_name"] == "QwenImageTransformer2DModel"
    engine = build(str(tiny_checkpoint()), SHARED)
    engine.load_checkpoint(str(checkpoint))
    found = QwenImageTransformer2DModel.from_pretrained(exported).state_dict()
    assert_same(engine.policies.state_dict()["ema"], found, atol=0)
    assert moved(found, weights(engine)) > 1e-4
