"""An address that documents name: what is here lives in `verl_omni.pipelines.sd3`."""

from verl_omni.pipelines.sd3 import *  # noqa: F403
