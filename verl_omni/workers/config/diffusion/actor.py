"""An address that documents name: what is here lives in `verl_omni.config.actor`."""

from verl_omni.config.actor import *  # noqa: F403
