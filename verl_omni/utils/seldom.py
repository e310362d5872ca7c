"""Errors that repeat, once a minute: a log is not to grow with what strangers send."""

import logging
import time
import traceback

SECONDS = 60.0


class Seldom(logging.Filter):
    """The first of its kind is logged as it is; then one line a minute, with how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        # Of the text only what is the same each time: the table has few rows, whatever comes.
        kind = (record.name, str(record.msg).partition("\n")[0], type(error))
        last, more = self._seen.get(kind, (None, 0))
        now = time.monotonic()
        if last is not None and now - last < SECONDS:
            self._seen[kind] = (last, more + 1)
            return False
        self._seen[kind] = (now, 0)
        if last is not None:
            said = record.getMessage().partition("\n")[0]
            if error is not None:
                said += f" ({traceback.format_exception_only(error)[-1].strip()})"
            record.msg, record.args = f"{said}; {more} more like it since the last such line", None
            record.exc_info = record.exc_text = None
        return True


seldom = Seldom()
