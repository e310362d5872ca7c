"""Ranks that share the tokens of each sample train as one rank does, whatever the architecture."""

import contextlib
import dataclasses
import queue

import pytest
import test_architectures as architectures
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import ready_to_fork
from test_two_ranks import whole
from tiny_models import tiny_checkpoint

from verl_omni.config import CheckpointConfig, DiffusionActorConfig, FSDPConfig, OptimizerConfig, VeOmniConfig
from verl_omni.trainer.checks.workers import check_training_engine
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.engine.registry import engine_class
from verl_omni.workers.engine.sequence import SharedSequence

ROWS = {row.name: row for row in architectures.TABLE}
# Qwen-Image's prompts are of several lengths, some of them odd: with padding that nobody may attend to.
SHARED = [
    "QwenImagePipeline", "QwenImageEditPlusPipeline", "FluxPipeline", "Flux2Pipeline", "Flux2KleinPipeline",
    "WanPipeline", "WanPipeline-2.2", "LTX2Pipeline",
]  # fmt: skip
SELDOM = ["LTX2Pipeline-2.3"]  # whose positions are cut along another axis
ALONE = ["FluxPipeline"]  # drawn by each rank as a whole, as is the default; the others by both together


def settings(strategy: str, ranks: int) -> FSDPConfig | VeOmniConfig:
    """Of an engine whose ranks share samples."""
    if strategy == "veomni":
        return VeOmniConfig(ulysses_parallel_size=ranks)
    return FSDPConfig(ulysses_sequence_parallel_size=ranks)


def two_updates(
    name: str,
    ranks: int = 1,
    rank: int = 0,
    data_ranks: int = 1,
    samples: int = 3,
    strategy: str = "fsdp2",
    **model,
) -> dict[str, torch.Tensor]:
    """Samples drawn here, gradient norms of updates on them, log-probabilities before and after, and the weights."""
    row = ROWS[name]
    model_config = dataclasses.replace(architectures.config(row, cfg=True, noise=0.7), **model)
    engine = engine_class(strategy)(
        model_config,
        settings(strategy, ranks),
        OptimizerConfig(optimizer="SGD", betas=(0.9, 0.999), lr=0.01, clip_grad=0.0),
        CheckpointConfig(),
    )
    engine.initialize()
    rollout = architectures.rollout(engine.model_config, engine.module)
    prompts, drawn = [*architectures.PROMPTS, "a dog"], None
    if ranks > 1 and strategy == "fsdp2":  # a forward that fails is left, and the weights are saved
        assert engine.sequence.group is not dist.group.WORLD
    together = ranks > 1 and engine.draws_together and name not in ALONE
    with engine.together() if together else engine.whole():
        if engine.layout.speaks(rank) or not together:  # others compute with whoever draws
            drawn = architectures.as_batch(architectures.generate(row, rollout, prompts)[:samples])
    if ranks > 1:  # as the driver sends a sample to all that train on it
        told = [drawn]
        dist.broadcast_object_list(told, src=rank - rank % ranks, group=engine.samples.get_group("sequence"))
        drawn = told[0]
    mine = slice(rank // ranks, None, data_ranks)
    data = {key: value[mine] for key, value in drawn.items()}
    found = {"latents": data["all_latents"].flatten(), "before": log_probs(engine, data)}
    assert (found["before"] - data["rollout_log_probs"].flatten()).abs().max() < 1e-6 or strategy == "veomni"
    with engine.train_mode():
        norms = [engine.train_batch(data, architectures.mean_log_prob)["metrics"]["grad_norm"] for _ in range(2)]
    return found | {
        "norms": torch.tensor(norms, dtype=torch.float64),
        "after": log_probs(engine, data),
        "weights": torch.cat([whole(p).flatten() for p in engine.parameters.values()]),
    }


def log_probs(engine: TrainingEngine, data: dict[str, torch.Tensor]) -> torch.Tensor:
    with engine.eval_mode():
        return engine.infer_batch(data)["model_output"]["log_probs"]


def one_of(
    rank: int, world: int, store: str, names: list[str], model: dict, shares: list[int], results: mp.Queue
) -> None:
    architectures.shrink_references()
    for name in names:
        tiny_checkpoint(name)  # before there are ranks: transformers since 5.15 writes a model on the first one only
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    found = {
        (name, ranks): two_updates(name, ranks, rank, world // ranks, **model) for name in names for ranks in shares
    }
    results.put((rank, {case: {k: v.tolist() for k, v in f.items()} for case, f in found.items()}))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(
    world: int, store: str, names: list[str], model: dict | None = None, shares: tuple[int, ...] = (2,)
) -> list[dict]:
    """What each rank saw of each architecture, of samples that 1 or 2 ranks share."""
    context = ready_to_fork()
    results = context.Queue()
    args = (world, store, names, model or {}, shares, results)
    ranks = [context.Process(target=one_of, args=(rank, *args), daemon=True) for rank in range(world)]
    for rank in ranks:
        rank.start()
    found = {}
    while len(found) < world:
        with contextlib.suppress(queue.Empty):
            found.update([results.get(timeout=1)])
        assert all(rank.exitcode in (None, 0) for rank in ranks), "a rank has failed: see above"
    for rank in ranks:
        rank.join()
    return [found[rank] for rank in range(world)]


@pytest.mark.parametrize("names", [SHARED, pytest.param(SELDOM, marks=pytest.mark.slow)], ids=["often", "seldom"])
def test_two_ranks_share_each_sample(names, tmp_path):
    architectures.shrink_references()
    shared = on_ranks(2, str(tmp_path / "store"), names)
    for name in names:
        alone = two_updates(name)
        assert alone["norms"].min() > 1e-3 and (alone["after"] - alone["before"]).abs().max() > 1e-4
        for found in (rank[name, 2] for rank in shared):
            for key, value in alone.items():
                torch.testing.assert_close(torch.tensor(found[key], dtype=value.dtype), value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # four processes; two ranks share each sample above
def test_two_groups_of_two_ranks_with_lora(tmp_path):
    lora = {"lora_rank": 4, "lora_alpha": 8, "samples": 2}
    shared = on_ranks(4, str(tmp_path / "store"), ["QwenImagePipeline"], lora)
    alone = two_updates("QwenImagePipeline", **lora)
    for rank, found in enumerate(shared):
        found = found["QwenImagePipeline", 2]
        for key in ("norms", "weights"):
            torch.testing.assert_close(
                torch.tensor(found[key], dtype=alone[key].dtype), alone[key], rtol=1e-4, atol=1e-5
            )
        mine = alone["after"].reshape(2, -1)[rank // 2 :: 2].flatten()
        assert found["after"] == pytest.approx(mine.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [
        ("StableDiffusion3Pipeline", {}, "diffusers has no plan for the tokens of SD3Transformer2DModel; set it to 1"),
        ("ZImagePipeline", {}, "diffusers has no plan for the tokens of ZImageTransformer2DModel"),
        ("LTX2ImageToVideoPipeline", {}, "tokens of a LTX2ImageToVideoPipeline are not shared by ranks; set it to 1"),
        ("FluxPipeline", {"height": 48, "width": 48}, "does not divide the 9 tokens of a sample of height=48 width=48"),
        ("WanPipeline", {"height": 48, "width": 48, "num_frames": 9}, "does not divide the 27 tokens of a sample of"),
    ],
)
def test_what_cannot_be_shared_is_refused(name, size, said):
    model_config = architectures.config(ROWS[name], cfg=True, noise=0.7)
    model_config.pipeline = dataclasses.replace(model_config.pipeline, **size)
    actor = DiffusionActorConfig()
    actor.fsdp_config.ulysses_sequence_parallel_size = 2
    with pytest.raises(ValueError, match=said):
        check_training_engine(model_config, actor)


def test_a_sample_of_an_odd_number_of_tokens_is_refused_in_words():
    """Whatever comes along in a data row, or with a picture to edit."""
    shared = SharedSequence.__new__(SharedSequence)
    shared.ranks = 2
    with pytest.raises(ValueError, match="a sample of 9 tokens cannot be shared equally by 2 ranks"):
        shared._check(torch.nn.Identity(), torch.zeros(1, 9, 4))
