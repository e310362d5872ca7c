"""Models that call a transformer more or less often, depending on what is in the batch, on ranks with other batches.

FSDP's ranks have to act together: a rank that calls less often than another would leave it waiting forever.
"""

import pytest
import test_architectures as architectures
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import ready_to_fork
from tiny_models import SINCE, tiny_checkpoint

from verl_omni.pipelines.utils import diffusers_since

ROWS = {row.name: row for row in architectures.TABLE}
# For each rank: samples, and which denoising step of each is trained.
SHARES = {
    # Step 0 is the high-noise transformer's, step 2 the other's.
    "WanPipeline-2.2": [([0, 1], [0, 0]), ([0, 1], [2, 2])],
    # Samples 0 and 2 have references of one shape, sample 1 of another.
    "QwenImageEditPlusPipeline": [([0, 2], [0, 0]), ([1, 2], [0, 0])],
}
if diffusers_since(SINCE["MiniMaxH3ModularPipeline"]):
    # One rank's samples share their time and the length of their text, the other's neither.
    SHARES["MiniMaxH3ModularPipeline"] = [([0, 0], [0, 0]), ([0, 1], [0, 1])]


def grad_norm(name: str, samples: list[int], steps: list[int]) -> list[float]:
    """Of an update on these steps of these samples, over all ranks.

    For Wan2.2 also how far a second update, on the high-noise transformer's step alone, moves each of the two, and how
    far a third, in which the low-noise transformer's rows are there and count for nothing.
    """
    row = ROWS[name]
    engine = architectures.training_engine(architectures.config(row, cfg=True, noise=0.7))
    rollout = architectures.rollout(engine.model_config, engine.module)
    with engine.whole():
        data = architectures.as_batch(architectures.generate(row, rollout, [*architectures.PROMPTS, "a dog"]))
    data = {key: value[samples] for key, value in data.items()}
    data["train_steps"] = torch.tensor(steps)[:, None]
    with engine.train_mode():
        norm = engine.train_batch(data, architectures.mean_log_prob)["metrics"]["grad_norm"]
        if len(engine.parts) == 1:
            return [norm]
        data["train_steps"] = torch.zeros(len(steps), 1, dtype=torch.long)
        found = [norm, *moved(engine, data)]
        data["train_steps"] = torch.tensor(steps)[:, None]
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        data["share"] = torch.tensor([ranks / 2 if step == 0 else 0.0 for step in steps])
        return found + moved(engine, data)


def moved(engine, data: dict[str, torch.Tensor]) -> list[float]:
    """How far an update moves each part."""
    before = {key: whole(p) for key, p in engine.parameters.items()}
    engine.train_batch(data, architectures.mean_log_prob)
    change = {key: (whole(p) - before[key]).abs().max().item() for key, p in engine.parameters.items()}
    return [max(v for k, v in change.items() if k.startswith(f"{part}.")) for part in engine.parts]


def whole(parameter: torch.nn.Parameter) -> torch.Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def one_of_two_ranks(rank: int, store: str, results: mp.Queue) -> None:
    architectures.shrink_references()
    for name in SHARES:
        tiny_checkpoint(name)  # before there are ranks: transformers since 5.15 writes a model on the first one only
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    results.put({name: grad_norm(name, *shares[rank]) for name, shares in SHARES.items()})
    dist.barrier()
    dist.destroy_process_group()


def test_an_update_of_two_ranks_is_that_of_one(tmp_path):
    context = ready_to_fork()
    results = context.Queue()
    ranks = [
        context.Process(target=one_of_two_ranks, args=(i, str(tmp_path / "store"), results), daemon=True)
        for i in range(2)
    ]
    for rank in ranks:
        rank.start()
    architectures.shrink_references()
    alone = {
        name: grad_norm(name, *(first + second for first, second in zip(*shares, strict=True)))
        for name, shares in SHARES.items()
    }
    together = [results.get(timeout=500) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert min(norm for norm, *_ in alone.values()) > 1e-3
    _, high_noise, low_noise, beside_fillers, of_fillers = alone["WanPipeline-2.2"]
    assert high_noise > 1e-3 and low_noise == 0.0, "a transformer that saw no sample stays as it is"
    assert beside_fillers > 1e-3 and of_fillers == 0.0, "and so does one whose samples count for nothing"
    for name, found in alone.items():
        assert [rank[name] for rank in together] == [pytest.approx(found, rel=1e-4)] * 2
