"""An address that documents name: what is here lives in `verl_omni.config`."""

from verl_omni.config import *  # noqa: F403
