"""Prompts, offline pairs, and their preparation."""

from verl_omni.data.prompt_dataset import PromptDataset
from verl_omni.data.prompt_loader import (
    PromptDataLoader,
    collate_fn,
    create_dataloader,
    create_val_dataloader,
    steps_for_epochs,
)

__all__ = [
    "PromptDataLoader",
    "PromptDataset",
    "collate_fn",
    "create_dataloader",
    "create_val_dataloader",
    "steps_for_epochs",
]
