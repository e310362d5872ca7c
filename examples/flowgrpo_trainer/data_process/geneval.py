"""An address that documents name: the same as `verl-omni prepare-geneval`."""

from verl_omni.cli.prepare_geneval import *  # noqa: F403
from verl_omni.cli.prepare_geneval import main

if __name__ == "__main__":
    main()
