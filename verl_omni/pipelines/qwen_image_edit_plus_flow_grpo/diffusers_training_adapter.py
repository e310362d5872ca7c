"""An address that documents name: what is here lives in `verl_omni.pipelines.qwen_image_edit_plus.adapter`."""

from verl_omni.pipelines.qwen_image_edit_plus.adapter import *  # noqa: F403
