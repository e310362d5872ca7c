"""An address that documents name: what is here lives in `verl_omni.pipelines.flux2.adapter`."""

from verl_omni.pipelines.flux2.adapter import *  # noqa: F403
