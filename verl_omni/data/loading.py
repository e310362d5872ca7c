"""The data sets that a configuration names."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_omni.data.offline_pairs import OfflinePairDataset, model_fingerprint
from verl_omni.data.prompt_dataset import PromptDataset
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.utils.hub import fetch_weights


def load_datasets(config: DictConfig) -> tuple[Any, Any]:
    """Training and validation data: prompts, or (offline) cached pairs that fit the model."""
    data, train, val = config.data, None, None
    if config.algorithm.sample_source == "offline":
        train = OfflinePairDataset(data.train_files)
        model = OmegaConf.to_object(config.actor_rollout_ref.model)
        fetch_weights(model.path)  # the fingerprint is of those that made the pairs
        fingerprint = model_fingerprint(model.path, DiffusionModelBase.get_class(model).trained_components)
        train.check(model, fingerprint, needs_scores=not config.algorithm.paired_preference)
        return train, None
    named = {"prompt_key": data.prompt_key}
    if data.train_files is not None and not config.trainer.val_only:
        train = PromptDataset(data.train_files, named, key="data.train_files")
    if data.val_files is not None:
        val = PromptDataset(data.val_files, named, key="data.val_files", max_samples=data.val_max_samples)
    return train, val
