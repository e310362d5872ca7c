"""An address that documents name: what is here lives in `verl_omni.pipelines.flux2`."""

from verl_omni.pipelines.flux2 import *  # noqa: F403
