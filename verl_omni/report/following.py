"""A metrics.jsonl that somebody else is writing: read on from where it was, whatever is done to it meanwhile."""

from pathlib import Path
from typing import Any

from verl_omni.utils.json_files import parse_object
from verl_omni.utils.regular_files import open_regular


class Follower:
    """The entries of a file that grows, whose last line may be written anew, and which a resumed run replaces."""

    def __init__(self, path: Path):
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._known: tuple[int, int, int] | None = None  # which file, its size and when it was written
        self._settled: list[dict[str, Any]] = []  # of all whole lines but the last, which may still change
        self._last, self._end = [], 0  # the entry of the last line, and where that line begins
        self.unreadable = 0

    def entries(self) -> list[dict[str, Any]]:
        """All that is there now. A line that is half written is no entry yet."""
        try:
            about = self.path.stat()
        except FileNotFoundError:
            self._forget()
            return []
        now = (about.st_ino, about.st_size, about.st_mtime_ns)
        if self._known is not None and (now[0] != self._known[0] or now[1] < self._known[1]):
            self._forget()
        if now != self._known:
            self._read_on()
            self._known = now
        return self._settled + self._last

    def _read_on(self) -> None:
        with open_regular(self.path) as file:
            file.seek(self._end)
            *whole, _unfinished = file.read().split(b"\n")
        for number, line in enumerate(whole):
            if number:  # the one before is not the last any more
                self._settled += self._last
                self.unreadable += not self._last
                self._end += len(whole[number - 1]) + 1
            self._last = _entry(line)


def _entry(line: bytes) -> list[dict[str, Any]]:
    """None for a line that is being written over at this moment; the next look has it."""
    try:
        entry = parse_object(line, "line")
    except ValueError:
        return []
    return [entry] if type(entry.get("step")) is int and isinstance(entry.get("data"), dict) else []
