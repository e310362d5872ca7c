"""A row of a file of prompts as the run knows it. Without torch: a reward can be asked before that is loaded."""

import json
from collections.abc import Sequence
from typing import Any

NO_SOURCE = "prompts"  # the data_source of rows that have none: in the names of metrics
SIZES = ("height", "width", "num_frames", "audio_duration_s")
FIELDS = ("data_source", "reward_model", "negative_prompt", "images", "agent_name", "extra_info", *SIZES)
MESSAGES = '[{"role": "user", "content": "..."}]'


def as_sample(row: dict[str, Any], columns: Sequence[str], prompt_key: str) -> dict[str, Any]:
    """Every field that the run has a use for, and all other columns in `extra_info`."""
    prompt = row[prompt_key]
    others = {column: row.get(column) for column in columns if column not in (*FIELDS, prompt_key)}
    return {
        **{column: row.get(column) for column in columns if column in FIELDS},
        "data_source": row.get("data_source") or NO_SOURCE,
        "reward_model": row.get("reward_model") or {"ground_truth": row.get("ground_truth")},
        "prompt": user_text(prompt),
        "raw_prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "negative_prompt": user_text(row.get("negative_prompt") or ""),
        "extra_info": others | (row.get("extra_info") or {}),
    }


def user_text(prompt: str | list[dict]) -> str:
    """The text of a plain prompt, or of the one user turn of a list of messages."""
    if isinstance(prompt, str):
        return valid_text(prompt)
    if not isinstance(prompt, list) or not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt):
        shown = json.dumps(prompt, ensure_ascii=False, default=str)
        raise ValueError(f"a prompt is a text or a list of messages {MESSAGES}, not {shown[:80]}")
    turns = [m["content"] for m in prompt if m["role"] == "user"]
    if len(turns) != 1:
        roles = ", ".join(str(m["role"]) for m in prompt) or "none"
        raise ValueError(f"messages need one user turn {MESSAGES}; the roles here are: {roles}")
    parts = [{"text": turns[0]}] if isinstance(turns[0], str) else turns[0]
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"the content of a message is a text or a list of parts, not {turns[0]!r}")
    return valid_text("".join(part.get("text") or "" for part in parts))


def valid_text(text: str) -> str:
    """The text itself. JSON can write half a surrogate pair, which is no letter: no tokenizer or file takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half, where = text[error.start].encode("unicode_escape").decode(), f"letter {error.start + 1}"
        raise ValueError(f"{where} is {half}, half of a surrogate pair and no valid text") from None
    return text
