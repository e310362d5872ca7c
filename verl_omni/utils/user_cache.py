"""Where the user's caches are."""

import os
from pathlib import Path


def user_cache(name: str) -> Path:
    """Ours of that name: in ~/.cache, or where XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_omni" / name
