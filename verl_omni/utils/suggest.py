"""Error messages for a name that is not known: say what was typed, the nearest known name, and all of them."""

import difflib
from collections.abc import Iterable

# For names that a user's module can add: where such a module has to be named, for workers too.
YOUR_OWN = "; one of your own is registered by a module that actor_rollout_ref.model.external_lib names"


def nearest(name: str, known: Iterable[str]) -> str:
    """` Did you mean "x"?` when a known name is close to ``name``, else an empty string."""
    by_lower = {str(k).lower(): str(k) for k in known}
    match = difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6)
    return f' Did you mean "{by_lower[match[0]]}"?' if match else ""


SHOWN = 200  # characters of a list: what is more than that nobody reads


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line such as ``unknown algorithm "flow_grop": did you mean "flow_grpo"? known: flow_grpo, mix_grpo``."""
    known = sorted({str(k) for k in known})
    hint = nearest(name, known).replace(" Did", "did", 1)
    listed = ", ".join(known) or "none"
    if len(listed) > SHOWN:
        listed = f"{listed[:SHOWN].rpartition(', ')[0]}, ... ({len(known)} in all)"
    return f'unknown {kind} "{name}": ' + (f"{hint} " if hint else "") + f"known: {listed}"
