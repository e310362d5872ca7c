"""What only Wan has: two transformers over several ranks, UniPC folders, frames."""

import dataclasses
import json
import shutil

import pytest
import test_architectures as architectures
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diffusers import UniPCMultistepScheduler
from tiny_models import tiny_checkpoint

from verl_omni.pipelines.wan_flow_grpo import Wan

ROWS = {row.name: row for row in architectures.TABLE}


def grad_norm(steps: list[int]) -> float:
    """Of an update on these denoising steps of every sample, over all ranks."""
    row = ROWS["WanPipeline-2.2"]
    engine = architectures.training_engine(architectures.config(row, cfg=True, noise=0.7))
    engine.gather()
    rollout = architectures.rollout(engine.model_config, engine.module)
    data = architectures.as_batch(architectures.generate(row, rollout, architectures.PROMPTS))
    engine.release()
    data["train_steps"] = torch.tensor([steps] * len(architectures.PROMPTS))
    with engine.train_mode():
        return engine.train_batch(data, architectures.mean_log_prob)["metrics"]["grad_norm"]


def one_of_two_ranks(rank: int, store: str, results: mp.Queue) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    results.put(grad_norm([0] if rank == 0 else [2]))
    dist.barrier()
    dist.destroy_process_group()


def test_ranks_may_need_different_transformers(tmp_path):
    """Step 0 is the high-noise transformer's, step 2 the other's; together they are one rank's update."""
    context = mp.get_context("spawn")
    results = context.Queue()
    ranks = [
        context.Process(target=one_of_two_ranks, args=(i, str(tmp_path / "store"), results), daemon=True)
        for i in range(2)
    ]  # fmt: skip
    for rank in ranks:
        rank.start()
    alone = grad_norm([0, 2])
    together = [results.get(timeout=200) for _ in ranks]
    for rank in ranks:
        rank.join()
    assert alone > 1e-3 and together == pytest.approx([alone, alone], rel=1e-5)


def test_a_unipc_folder_keeps_its_noise_schedule(tmp_path):
    shutil.copytree(tiny_checkpoint("WanPipeline"), tmp_path, dirs_exist_ok=True)
    upstream = UniPCMultistepScheduler(
        use_flow_sigmas=True, flow_shift=5.0, prediction_type="flow_prediction", num_train_timesteps=1000
    )
    upstream.save_pretrained(tmp_path / "scheduler")
    model_config = dataclasses.replace(architectures.config(ROWS["WanPipeline"], cfg=True), path=str(tmp_path))
    ours = Wan.build_scheduler(model_config)
    for steps in (4, 20):
        model_config.pipeline.num_inference_steps = steps
        Wan.set_timesteps(ours, model_config, "cpu")
        upstream.set_timesteps(steps)
        torch.testing.assert_close(ours.sigmas, upstream.sigmas, atol=2e-6, rtol=0)
        torch.testing.assert_close(ours.timesteps, upstream.timesteps.float(), atol=1.0, rtol=0)


def test_a_timestep_for_each_token(tmp_path):
    """Wan2.2-TI2V's `expand_timesteps`."""
    shutil.copytree(tiny_checkpoint("WanPipeline"), tmp_path, dirs_exist_ok=True)
    index = json.loads((tmp_path / "model_index.json").read_text())
    (tmp_path / "model_index.json").write_text(json.dumps(index | {"expand_timesteps": True}))
    row = ROWS["WanPipeline"]
    model_config = dataclasses.replace(architectures.config(row, cfg=True), path=str(tmp_path))
    (output,) = architectures.generate(row, architectures.rollout(model_config), architectures.PROMPTS[:1])
    pipe = row.pipeline.from_pretrained(tmp_path)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.config.expand_timesteps
    expected, _ = architectures.draw(pipe, row, architectures.PROMPTS[0], 0, cfg=True)
    torch.testing.assert_close(output.trajectory["final_latents"][None], expected, atol=1e-5, rtol=1e-5)


def test_frames_that_wan_cannot_make_are_an_error():
    model_config = architectures.config(ROWS["WanPipeline"], cfg=True)
    Wan.check(model_config)
    model_config.pipeline.num_frames = 16
    with pytest.raises(ValueError, match=r"num_frames=16: Wan makes 4k \+ 1 frames, such as 17"):
        Wan.check(model_config)
