"""An address that documents name: what is here lives in `verl_omni.pipelines.wan.adapter`."""

from verl_omni.pipelines.wan.adapter import *  # noqa: F403
