"""An address that documents name: what is here lives in `verl_omni.pipelines.sd3.adapter`."""

from verl_omni.pipelines.sd3.adapter import *  # noqa: F403
