"""Keys and passwords that a user gave are for the run, not for the files that it leaves."""

import re
from typing import Any

from verl_omni.utils.secrets import is_reference

# The last word of a setting's name: reward_kwargs.api_key, judge.access_token. Not max_tokens, not tokenizer_path.
NAMES = (
    *("api_?key", "access_?key", "secret_?key", "private_?key", "token", "secret", "password", "passwd", "passphrase"),
    *("credentials?", "auth", "authorization", "bearer", "cookie"),
)
SECRET = re.compile(rf"(^|[._-])({'|'.join(NAMES)})$", re.IGNORECASE)
# What well-known services hand out, whatever the setting is called.
SHAPE = re.compile(
    r"\b(sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
    r"|\b(Bearer|Basic) +[\w.~+/=-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    re.IGNORECASE,
)
IN_ADDRESS = re.compile(
    r"(\w://[^/\s:@]*:)[^/\s@]+(?=@)|([?&](?:api_?key|\w*token|secret|password)=)[^&\s]+", re.IGNORECASE
)
MASK = "***"


def masked_argument(argument: str) -> str:
    """`a.b.api_key=xyz` without its value; dicts that hold one lose all of theirs."""
    name, equals, value = argument.partition("=")
    if not equals:
        return masked(argument)
    if value == "null" or is_reference(value):
        return argument
    names = [*name.lstrip("+~").split("."), *re.findall(r"[{,]\s*['\"]?([\w.-]+)['\"]?\s*:", value)]
    return f"{name}={MASK}" if any(map(SECRET.search, names)) else f"{name}={masked(value)}"


def masked(tree: Any, secret: bool = False) -> Any:
    """Plain data (dicts, lists, values) with every secret replaced: all below a name that says so, and what has the
    shape of one. A reference to one (`env:NAME`, `file:PATH`) tells nothing and stays."""
    if isinstance(tree, dict):
        return {key: masked(value, secret or bool(SECRET.search(str(key)))) for key, value in tree.items()}
    if isinstance(tree, list):
        return [masked(value, secret) for value in tree]
    if tree is None or isinstance(tree, bool) or is_reference(tree):
        return tree
    if secret or (isinstance(tree, str) and SHAPE.search(tree)):
        return MASK
    return IN_ADDRESS.sub(lambda found: f"{found[1] or found[2]}{MASK}", tree) if isinstance(tree, str) else tree
