"""One of the servers that a client may ask, with its circuit breaker."""

import logging
import time
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Replica:
    """One server: how busy it is, and whether it may be asked.

    After `breaker_after` failures in a row nobody asks it for `breaker_pause` seconds; then one request tries.
    """

    address: str
    breaker_after: int
    breaker_pause: float
    in_flight: int = 0
    failures: int = 0
    ready_at: float = 0.0
    down_since: float | None = None
    trying: bool = False
    words: str = "not asked yet"

    @property
    def broken(self) -> bool:
        return self.failures >= self.breaker_after

    def may_be_asked(self) -> bool:
        return time.monotonic() >= self.ready_at and not (self.broken and self.trying)

    def down_for(self) -> float:
        return 0.0 if self.down_since is None else time.monotonic() - self.down_since

    def answered(self) -> None:
        self.failures, self.down_since = 0, None

    def busy(self, words: str, seconds: float) -> None:
        """It says when it has time."""
        self.answered()
        self.words, self.ready_at = words, time.monotonic() + seconds

    def failed(self, words: str, down: bool = False) -> None:
        """It answers with an error or too late; or there is nobody (down)."""
        now = time.monotonic()
        self.failures, self.words = self.failures + 1, words
        self.down_since = (self.down_since or now) if down else None
        if self.broken:
            self.ready_at = now + self.breaker_pause
        if self.failures == self.breaker_after:
            log.warning("%s failed %d times in a row, the last: %s", self.address, self.failures, words)
