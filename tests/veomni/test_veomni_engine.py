"""VeOmni trains as FSDP2 does, to 1e-5, where each rank has rows of its own and where ranks share them."""

from pathlib import Path

import pytest
import torch
from diffusers import QwenImagePipeline
from engine_cases import assert_same, make_engine, model_config, moved, roll_out, weights
from ranks import start_ranks
from test_layouts import (
    COPIES,
    LAYOUTS,
    LORA_COPIES,
    SHARED,
    assert_same_steps,
    build,
    check_export,
    one_more,
    rank_main,
    steps_of,
)
from test_sequence_parallel import architectures, on_ranks, two_updates
from tiny_models import tiny_checkpoint

from verl_omni.workers.engine.export import LORA_FILE

LORA = {"lora_rank": 4, "lora_alpha": 8}
# Qwen-Image's prompts are of several lengths, some of them odd: VeOmni pads them itself.
NAMES = ["QwenImagePipeline", "WanPipeline"]


def check_rank(found: dict, alone: dict[str, torch.Tensor], rank: int, shares: int, world: int) -> None:
    for key in ("norms", "weights"):
        torch.testing.assert_close(torch.tensor(found[key], dtype=alone[key].dtype), alone[key], rtol=1e-4, atol=1e-5)
    for key in ("before", "after"):
        mine = alone[key].reshape(alone["samples"], -1)[rank // shares :: world // shares].flatten()
        assert found[key] == pytest.approx(mine.tolist(), abs=1e-5)


def compare(names: list[str], store, **model) -> None:
    """Two ranks of VeOmni, each with rows of its own and sharing tokens, beside one of FSDP2."""
    architectures.shrink_references()
    ranks = on_ranks(2, str(store), names, model | {"strategy": "veomni", "samples": 2}, shares=(1, 2))
    for name in names:
        alone = two_updates(name, samples=2, **model)
        assert alone["norms"].min() > 1e-4 and (alone["after"] - alone["before"]).abs().max() > 1e-4
        alone["samples"] = 2
        for rank, found in enumerate(ranks):
            for shares in (1, 2):
                check_rank(found[name, shares], alone, rank, shares, world=2)


def test_two_ranks_train_all_weights_as_fsdp2_does(tmp_path):
    compare(NAMES, tmp_path / "store")


def test_two_ranks_train_a_lora_as_fsdp2_does(tmp_path):
    compare(["QwenImagePipeline"], tmp_path / "store", **LORA)


@pytest.mark.slow
def test_two_ranks_train_the_others_too(tmp_path):
    others = ["QwenImageEditPlusPipeline", "WanPipeline-2.2"]
    compare(others, tmp_path / "store")
    compare([*others, "WanPipeline"], tmp_path / "store_of_lora", **LORA)


def test_a_run_goes_on_from_one_rank_of_fsdp2_to_two_of_veomni_and_back(tmp_path):
    path = str(tiny_checkpoint())
    for lora in (False, True):
        torch.save(roll_out(make_engine(model_config(path, lora=lora))), tmp_path / f"{lora}.pt")
    data, after = torch.load(tmp_path / "False.pt"), [tmp_path / f"after_{stage}" for stage in range(4)]
    stages = one_more(path, SHARED, data, None, after[1])
    start_ranks(rank_main, (2, str(tmp_path), path, [], SHARED, 2, "veomni"))
    stages += torch.load(tmp_path / "seen_by_2.pt")["resumed"]
    stages += one_more(path, SHARED, data, after[2], after[3])
    assert_same_steps(stages, steps_of(build(path, SHARED), data, 3))
    check_export(after[2])


def test_four_ranks_train_two_copies_as_one_rank_does_and_a_lora_goes_on_with_them_and_back(tmp_path):
    """Of each copy two ranks hold one. The LoRA is resumed, saved and exported by VeOmni."""
    path = str(tiny_checkpoint())
    for lora in (False, True):
        torch.save(roll_out(make_engine(model_config(path, lora=lora))), tmp_path / f"{lora}.pt")
    data, after = torch.load(tmp_path / "True.pt"), [tmp_path / f"after_{stage}" for stage in range(4)]
    stages = one_more(path, LORA_COPIES, data, None, after[1])
    copies = [COPIES, LORA_COPIES]
    start_ranks(rank_main, (4, str(tmp_path), path, copies, LORA_COPIES, 2, "veomni"), ranks=4)
    four = torch.load(tmp_path / "seen_by_4.pt")
    stages += four["resumed"] + one_more(path, LORA_COPIES, data, after[2], after[3])
    alone = steps_of(build(path, LORA_COPIES), data, 3)
    assert_same_steps(stages, alone)
    for name in copies:
        full = alone[:2] if LAYOUTS[name][3] else steps_of(build(path, name), torch.load(tmp_path / "False.pt"), 2)
        assert_same_steps(four[name], full)
    check_lora(after[2])


def check_lora(checkpoint: Path) -> None:
    """diffusers loads what VeOmni's ranks wrote: the average, as the checkpoint has it."""
    pipe = QwenImagePipeline.from_pretrained(tiny_checkpoint())
    pipe.load_lora_weights(checkpoint / "export", weight_name=LORA_FILE, adapter_name="default")
    saved = {name: value for name, value in pipe.transformer.state_dict().items() if ".lora_" in name}
    engine = build(str(tiny_checkpoint()), LORA_COPIES)
    engine.load_checkpoint(str(checkpoint))
    average = engine.policies.state_dict()["ema"]
    assert moved(average, weights(engine)) > 1e-5
    assert_same(average, saved, atol=0)


@pytest.mark.parametrize(
    ("name", "model"),
    [("QwenImagePipeline", {}), ("QwenImagePipeline", LORA), ("WanImageToVideoPipeline", {})],
    ids=["full", "lora", "from a first frame"],
)
def test_one_rank_trains_as_fsdp2_does(name, model):
    alone, found = (two_updates(name, samples=2, strategy=strategy, **model) for strategy in ("fsdp2", "veomni"))
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
