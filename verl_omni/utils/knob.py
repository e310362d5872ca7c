"""An address that documents name: what is here lives in `verl_omni.config.knob`."""

from verl_omni.config.knob import *  # noqa: F403
