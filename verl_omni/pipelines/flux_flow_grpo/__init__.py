"""An address that documents name: what is here lives in `verl_omni.pipelines.flux`."""

from verl_omni.pipelines.flux import *  # noqa: F403
