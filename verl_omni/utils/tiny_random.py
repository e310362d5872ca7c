"""An address that documents name: what is here lives in `verl_omni.testing.tiny_random`."""

from verl_omni.testing.tiny_random import *  # noqa: F403
from verl_omni.testing.tiny_random import main

if __name__ == "__main__":
    main()
