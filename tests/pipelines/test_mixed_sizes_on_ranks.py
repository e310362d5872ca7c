"""Ranks whose samples have unequally many sizes: the update is that of one rank.

FSDP's ranks have to act together: without company, the rank with fewer sizes would leave the other waiting forever.
"""

import asyncio
import os

import pytest
import test_architectures as architectures
import torch
import torch.distributed as dist
from ranks import start_ranks
from safetensors.torch import load_file, save_file
from test_architectures import PROMPTS, SEQUENCE
from tiny_models import tiny_checkpoint

from verl_omni.workers.columns import stacked
from verl_omni.workers.engine.passes import Passes

ROW = next(row for row in architectures.TABLE if row.name == "QwenImagePipeline")
SIZES = [(32, 32), (32, 32), (32, 48), (48, 32)]  # of each sample
SHARES = [[0, 1], [2, 3]]  # one size, and two


def draw(engine, i: int):
    tokenizers = engine.adapter.load_tokenizers(engine.model_config)
    steps = engine.adapter.num_steps(engine.model_config)
    height, width = SIZES[i]
    params = {"seed": i, "keep_trajectory": True, "sde_window": (0, steps - 1), "height": height, "width": width}
    return asyncio.run(engine.generate(engine.adapter.tokenize(tokenizers, PROMPTS[0], SEQUENCE), params, str(i)))


def learned(samples: list[int], file: str) -> None:
    """Write what training finds of these samples, and the gradient and update that all ranks make of theirs."""
    engine = architectures.training_engine(architectures.config(ROW, cfg=False, noise=0.7), lr=1e-3)
    engine.micro_batch_size = 2
    with engine.whole():
        outputs = [draw(architectures.rollout(engine.model_config, engine.module), i) for i in samples]
    rows = [output.trajectory | output.conditions for output in outputs]
    data = {name: stacked(name, [row[name] for row in rows]) for name in rows[0]}
    data["mixed"] = torch.ones(len(samples), dtype=torch.bool)
    with engine.eval_mode():
        found = engine.infer_batch(data)["model_output"]["log_probs"]
    with engine.train_mode():
        engine.forward_backward_batch(data, architectures.mean_log_prob)
        gradient = {f"gradient {name}": whole(p.grad) for name, p in engine.parameters.items() if p.grad is not None}
        norm = engine.train_batch(data, architectures.mean_log_prob)["metrics"]["grad_norm"]
    ratio = (found.view_as(data["rollout_log_probs"]) - data["rollout_log_probs"]).exp()
    save_file(gradient | {"ratio": ratio, "norm": torch.tensor(norm)}, file)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def one_of_two_ranks(rank: int, folder: str) -> None:
    tiny_checkpoint(ROW.name)  # before there are ranks: transformers since 5.15 writes a model on the first one only
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(os.path.join(folder, "store"), 2))
    counted, forward = [], Passes.forward_step

    def counts(self, *args, **kwargs):
        counted.append(1)
        return forward(self, *args, **kwargs)

    Passes.forward_step = counts
    learned(SHARES[rank], os.path.join(folder, f"{rank}.safetensors"))
    calls = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(calls, torch.tensor([float(len(counted))]))
    assert calls[0] == calls[1] > 0, "both ranks make as many forwards"
    dist.destroy_process_group()


@pytest.mark.timeout(150)
def test_an_update_of_ranks_with_unequally_many_sizes_is_that_of_one(tmp_path):
    start_ranks(one_of_two_ranks, (str(tmp_path),))
    learned([i for share in SHARES for i in share], str(tmp_path / "alone"))
    alone = load_file(tmp_path / "alone")
    assert alone["norm"] > 1e-3
    for rank in range(2):
        found = load_file(tmp_path / f"{rank}.safetensors")
        torch.testing.assert_close(found["ratio"], torch.ones_like(found["ratio"]), atol=1e-6, rtol=0)
        torch.testing.assert_close(found["norm"], alone["norm"], rtol=1e-4, atol=0)
        gradients = [name for name in alone if name.startswith("gradient")]
        assert gradients and {*gradients, "ratio", "norm"} == found.keys()
        for name in gradients:
            limit = 1e-4 * alone[name].abs().max().item() + 1e-7
            torch.testing.assert_close(found[name], alone[name], atol=limit, rtol=0)
