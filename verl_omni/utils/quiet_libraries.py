"""What libraries have to say goes to the log, not to the user's screen."""

import os

VLLM = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}


def keep_vllm_quiet() -> None:
    """Before it is imported, which the checks of a run do too; what the user has set stays."""
    for name, value in VLLM.items():
        os.environ.setdefault(name, value)
