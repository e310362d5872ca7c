"""An address that documents name: what is here lives in `verl_omni.data.prepare_offline_dpo`."""

from verl_omni.data.prepare_offline_dpo import *  # noqa: F403
from verl_omni.data.prepare_offline_dpo import main

if __name__ == "__main__":
    main()
