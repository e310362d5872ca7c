"""An address that documents name: what is here lives in `verl_omni.pipelines.z_image.adapter`."""

from verl_omni.pipelines.z_image.adapter import *  # noqa: F403
