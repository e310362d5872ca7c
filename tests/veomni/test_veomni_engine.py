"""VeOmni trains as FSDP2 does, to 1e-5, where each rank has rows of its own and where ranks share them."""

import pytest
import torch
from engine_cases import make_engine, model_config, roll_out
from ranks import start_ranks
from test_layouts import SHARED, assert_same_steps, build, check_export, one_more, rank_main, steps_of
from test_sequence_parallel import architectures, on_ranks, two_updates
from tiny_models import tiny_checkpoint

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


@pytest.mark.parametrize(
    ("name", "model"),
    [("QwenImagePipeline", {}), ("QwenImagePipeline", LORA), ("WanImageToVideoPipeline", {})],
    ids=["full", "lora", "from a first frame"],
)
def test_one_rank_trains_as_fsdp2_does(name, model):
    alone, found = (two_updates(name, samples=2, strategy=strategy, **model) for strategy in ("fsdp2", "veomni"))
    for key, value in alone.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6)
