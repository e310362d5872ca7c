"""An address that documents name: what is here lives in `verl_omni.pipelines.z_image`."""

from verl_omni.pipelines.z_image import *  # noqa: F403
