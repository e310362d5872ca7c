"""Keys and passwords that a user gave are for the run, not for the files that it leaves."""

import re
from typing import Any

from verl_omni.utils.secrets import is_reference

# The last word of a name: reward_kwargs.api_key, X-Api-Key, judge.accessToken. Not max_tokens, not tokenizer_path.
KEYS = "api|access|secret|private|subscription|auth|account|signing|encryption|master|ssh"
TOKENS = "access|auth|api|bearer|refresh|session|security"
NAMES = (
    *(rf"(?:{KEYS})[_. -]?keys?", rf"(?:{TOKENS})[_. -]?tokens?", "token", "secrets?", "passwords?", "passwd", "pwd"),
    *("passphrases?", "credentials?", "auth", "authorization", "bearer", "cookies?", "jwt"),
)
LAST_WORD = rf"(?:{'|'.join(NAMES)})[_. -]?\d*"
SECRET = re.compile(rf"(^|[_. -]){LAST_WORD}$", re.IGNORECASE)
# accessToken, openaiAPIKey
WORDS_MEET = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# What well-known services hand out, whatever the setting is called.
SHAPE = re.compile(
    r"\b(sk-[\w-]{16,}|hf_\w{16,}|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|AKIA[0-9A-Z]{16}|AIza[\w-]{30,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*)"
    r"|\b(Bearer|Basic) +[\w.~+/=-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----",
    re.IGNORECASE,
)
# Before the value: in an address, and in a command line (--api-key X).
IN_TEXT = re.compile(
    rf"(\w://[^/\s:@]*:)[^/\s@]+(?=@)|([?&;](?:[\w.-]*[_.-])?(?:{LAST_WORD}|\w*token|key|sig|signature)=)[^&;\s]+"
    rf"|((?:^|\s)--?(?:[\w.-]*[_.-])?{LAST_WORD}(?:=|\s+)['\"]?)[^\s'\"]+",
    re.IGNORECASE,
)
MASK = "***"


def masked_argument(argument: str) -> str:
    """`a.b.api_key=xyz` without its value; dicts that hold one lose all of theirs."""
    name, equals, value = argument.partition("=")
    if not equals:
        return masked(argument)
    if value == "null" or is_reference(value):
        return argument
    names = [*name.lstrip("+~").split("."), *re.findall(r"[{,]\s*['\"]?([\w. -]+)['\"]?\s*:", value)]
    return f"{name}={MASK}" if any(map(is_secret, names)) else f"{name}={masked(value)}"


def is_secret(name: str) -> bool:
    """Whether what has this name is nobody's to read."""
    return bool(SECRET.search(WORDS_MEET.sub("_", name.strip())))


def masked(tree: Any, secret: bool = False) -> Any:
    """Plain data (dicts, lists, values) with every secret replaced: all below a name that says so, and what has the
    shape of one. A reference to one (`env:NAME`, `file:PATH`) tells nothing and stays."""
    if isinstance(tree, dict):
        return {key: masked(value, secret or is_secret(str(key))) for key, value in tree.items()}
    if isinstance(tree, list):
        return [masked(value, secret) for value in tree]
    if tree is None or isinstance(tree, bool) or is_reference(tree):
        return tree
    if secret or (isinstance(tree, str) and SHAPE.search(tree)):
        return MASK
    return IN_TEXT.sub(lambda at: f"{at[1] or at[2] or at[3]}{MASK}", tree) if isinstance(tree, str) else tree
