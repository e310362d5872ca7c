"""An address that documents name: the run lives in `verl_omni.trainer.runner`, the command in `verl_omni.cli.train`."""

from verl_omni.cli.train import command, main

__all__ = ["TaskRunner", "main", "run_diffusion"]

if __name__ == "__main__":
    command()  # which forks before it imports what a run needs: until then nobody has a line for a Ctrl-C
else:
    from verl_omni.trainer.runner import TaskRunner, run_diffusion
