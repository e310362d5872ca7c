"""An address that documents name: what is here lives in `verl_omni.pipelines.flux.adapter`."""

from verl_omni.pipelines.flux.adapter import *  # noqa: F403
