"""An address that documents name: what is here lives in `verl_omni.pipelines.flux.vllm_omni_rollout_adapter`."""

from verl_omni.pipelines.flux.vllm_omni_rollout_adapter import *  # noqa: F403
