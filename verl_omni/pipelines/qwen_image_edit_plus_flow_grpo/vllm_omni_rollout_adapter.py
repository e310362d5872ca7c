"""An address that documents name: the adapter itself is `qwen_image_edit_plus.vllm_omni_rollout_adapter`."""

from verl_omni.pipelines.qwen_image_edit_plus.vllm_omni_rollout_adapter import *  # noqa: F403
