"""How long a run's prompts are, in ids of the model's own tokenizer."""

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.data.loading import load_datasets
from verl_omni.data.open_images import open_images
from verl_omni.pipelines.model_base import DiffusionModelBase

LOOKED_AT = 64  # rows


def prompt_tokens(config: DictConfig, settings: DiffusionTrainerConfig) -> tuple[int, int]:
    """(the longest of the first training prompts, the longest of their negative ones).

    Cached pairs hold their prompts encoded: there it is the model's limit.
    """
    arr = settings.actor_rollout_ref
    pipeline, limit = arr.rollout.pipeline, arr.rollout.pipeline.max_sequence_length
    dataset = load_datasets(config)[0] if settings.algorithm.sample_source == "online" else None
    if dataset is None:
        return limit, limit
    adapter = DiffusionModelBase.get_class(arr.model)
    tokenizers = adapter.load_tokenizers(arr.model)
    rows = [dataset[i] for i in range(min(LOOKED_AT, len(dataset)))]

    def longest(tokenize: Callable[..., list[int]], texts: list[tuple[str, Any]]) -> int:
        return max(len(tokenize(tokenizers, text, limit, open_images(images))) for text, images in texts)

    negative = [(row.get("negative_prompt") or pipeline.negative_prompt, row.get("images")) for row in rows]
    own = [(row["prompt"], row.get("images")) for row in rows]
    return longest(adapter.tokenize, own), longest(adapter.tokenize_negative, negative)
