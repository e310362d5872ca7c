"""An address that documents name: what is here lives in `verl_omni.pipelines.qwen_image_edit_plus`."""

from verl_omni.pipelines.qwen_image_edit_plus import *  # noqa: F403
