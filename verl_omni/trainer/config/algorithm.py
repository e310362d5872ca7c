"""An address that documents name: what is here lives in `verl_omni.config.algorithm`."""

from verl_omni.config.algorithm import *  # noqa: F403
