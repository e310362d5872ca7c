"""Both rollout engines, asked for the same."""

import asyncio
from typing import Any

import torch
from PIL import Image
from test_architectures import SEQUENCE, Architecture

from verl_omni.config import DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.utils.responses import Video, VideoWithSound, pixels_of
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.batched import BatchedRollout

GUARD = 300


def vllm_rollout(model_config: DiffusionModelConfig, max_num_seqs: int = 3) -> Any:
    from verl_omni.workers.rollout.vllm_rollout.engine import VllmOmniRollout

    config = DiffusionRolloutConfig(name="vllm_omni", max_num_seqs=max_num_seqs, cfg_in_one_forward=False)
    return VllmOmniRollout(config, model_config, torch.float32, compiled=False)


def ask(
    row: Architecture,
    engine: BatchedRollout,
    model_config: DiffusionModelConfig,
    prompts: list[str],
    cfg: bool = True,
    images: list[list[Image.Image]] | None = None,
    **params: Any,
) -> list[RolloutOutput]:
    """A burst: prompt i with seed i; a list among `params` has one value for each. `images` come in turn."""
    adapter = DiffusionModelBase.get_class(model_config)
    tokenizers = adapter.load_tokenizers(model_config)
    images = images or row.images
    shared = row.knobs(cfg) | {"keep_trajectory": True, "sde_window": (0, adapter.num_steps(model_config) - 1)}

    async def run() -> list[RolloutOutput]:
        calls = []
        for i, prompt in enumerate(prompts):
            own = {name: value[i] if isinstance(value, list) else value for name, value in params.items()}
            own = shared | {"seed": i, "position": (i, len(prompts))} | own
            seen = images and images[i % len(images)]
            ids = adapter.tokenize(tokenizers, prompt, SEQUENCE, seen)
            negative = adapter.tokenize_negative(tokenizers, row.negative, SEQUENCE, seen)
            calls.append(engine.generate(ids, own, str(i), image_data=seen, negative_prompt_ids=negative))
        return await asyncio.wait_for(asyncio.gather(*calls), GUARD)

    return asyncio.run(run())


def assert_same(one: RolloutOutput, other: RolloutOutput, tolerance: float = 2e-5) -> None:
    """Everything that training gets, and the picture but for rounding at the edge of two values."""
    for mine, theirs in ((one.trajectory, other.trajectory), (one.conditions, other.conditions)):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], atol=tolerance, rtol=tolerance)
    assert one.modality == other.modality
    (mine, my_sound), (theirs, their_sound) = seen_and_heard(one.response), seen_and_heard(other.response)
    assert mine.dtype == torch.uint8 and (mine.int() - theirs.int()).abs().max() <= 1
    torch.testing.assert_close(my_sound, their_sound, atol=tolerance, rtol=tolerance)


def seen_and_heard(response: torch.Tensor | Video | VideoWithSound) -> tuple[torch.Tensor, torch.Tensor]:
    return pixels_of(response), response.sound.samples if isinstance(response, VideoWithSound) else torch.zeros(0)
