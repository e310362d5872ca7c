"""An address that documents name: what is here lives in `verl_omni.pipelines.wan`."""

from verl_omni.pipelines.wan import *  # noqa: F403
