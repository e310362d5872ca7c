"""An address that documents name: what is here lives in `verl_omni.rewards`."""

from verl_omni.rewards import *  # noqa: F403
