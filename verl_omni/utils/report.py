"""An address that documents name: what is here lives in `verl_omni.report.report`."""

from verl_omni.report.report import *  # noqa: F403
from verl_omni.report.report import main

if __name__ == "__main__":
    main()
