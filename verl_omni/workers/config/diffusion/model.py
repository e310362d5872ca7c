"""An address that documents name: what is here lives in `verl_omni.config.model`."""

from verl_omni.config.model import *  # noqa: F403
