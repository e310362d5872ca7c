"""An address that documents name: the same as `verl-omni prepare-ocr`."""

from verl_omni.cli.prepare_ocr import *  # noqa: F403
from verl_omni.cli.prepare_ocr import main

if __name__ == "__main__":
    main()
