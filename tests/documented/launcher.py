"""A user's launch script: it imports the extension and calls the trainer."""

import my_algo  # noqa: F401  (registers the algorithm)

from verl_omni.trainer.main_diffusion import main

if __name__ == "__main__":
    main()
