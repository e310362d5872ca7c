"""Keys and passwords that a user gave on the command line are for the run, not for the files that it leaves."""

import re
from typing import Any

# The last word of a setting's name: reward_kwargs.api_key, judge.access_token. Not max_tokens, not tokenizer_path.
SECRET = re.compile(r"(^|[._-])(api_?key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
MASK = "***"


def masked_argument(argument: str) -> str:
    """`a.b.api_key=xyz` without its value; dicts that hold one lose all of theirs."""
    name, equals, value = argument.partition("=")
    if not equals:
        return argument
    names = re.findall(r"[{,]\s*['\"]?([\w.-]+)['\"]?\s*:", value)
    hide = SECRET.search(name) or any(SECRET.search(found) for found in names)
    return f"{name}={MASK}" if hide and value != "null" else argument


def masked(tree: Any) -> Any:
    """Plain data (dicts, lists, values) with the value of every secret replaced."""
    if isinstance(tree, dict):
        return {
            key: MASK if SECRET.search(str(key)) and isinstance(value, str) else masked(value)
            for key, value in tree.items()
        }
    return [masked(value) for value in tree] if isinstance(tree, list) else tree
