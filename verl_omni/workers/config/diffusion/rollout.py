"""An address that documents name: what is here lives in `verl_omni.config.rollout`."""

from verl_omni.config.rollout import *  # noqa: F403
