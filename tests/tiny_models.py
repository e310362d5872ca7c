"""Tiny-random checkpoints for tests: built once per process, in a temporary folder that goes away with it."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

from verl_omni.utils.tiny_random import build_tiny_random


@functools.cache
def tiny_checkpoint(pipeline_class: str = "QwenImagePipeline", seed: int = 0) -> Path:
    """The folder of a tiny-random checkpoint. Shared by all tests of this process: read it, do not write to it."""
    root = tempfile.mkdtemp(prefix=f"tiny-{pipeline_class}-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return build_tiny_random(pipeline_class, root, seed)
