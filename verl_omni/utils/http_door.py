"""Who is let in to the house's HTTP servers, and how long one may take to say what one wants.

A connection costs a file handle and some memory even where nobody speaks, so there are so many of them in all and for
each address. Who comes when that is full takes the place of the one that has been slow for longest: a good client says
all it wants within a second, and then waits without being cut off.
"""

import asyncio
import functools
import ipaddress
import logging
import os
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from verl_omni.utils.http_requests import BODY_SECONDS, PATIENCE_SECONDS
from verl_omni.utils.listening import Connections
from verl_omni.utils.seldom import seldom

log = logging.getLogger(__name__)

# Longer than clients keep a connection that they do not use: else one may be closed while a request is on its way.
KEEP_ALIVE_SECONDS = 60
HEADER_BYTES = 2**14
# How long a connection may be at each point; at others, as while an answer is made, there is no limit.
SECONDS = {"headers": 10, "body": BODY_SECONDS + 5, "answer": 60, "end": 10}  # a late body is first told so
# Connections that asyncio takes at a time, before any is looked at; and file handles for the rest of the process.
TAKEN_AT_ONCE, SPARE_HANDLES, FEWEST = 128, 32, 16
FULL = b'{"detail": "too many connections are open: come back later"}'
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(FULL), FULL)
)


def guarded(app: Any, connections: Connections, grace: float) -> uvicorn.Config:
    """Of a server that lets in no more than that, and gives `grace` seconds to what is under way when it ends."""
    for name in ("uvicorn.error", "asyncio"):
        logging.getLogger(name).addFilter(seldom)
    log.addFilter(seldom)
    return uvicorn.Config(
        app,
        http=functools.partial(Connection, Door(connections)),
        ws="none",
        log_level="error",
        lifespan="off",
        backlog=TAKEN_AT_ONCE,
        h11_max_incomplete_event_size=HEADER_BYTES,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=grace,
    )


@dataclass
class Door:
    connections: Connections
    inside: set["Connection"] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.most = min(self.connections.most, handles_left())
        if self.most < self.connections.most:
            log.warning(
                "there are file handles for %d connections, not for %d: raise `ulimit -n`",
                self.most,
                self.connections.most,
            )

    def enter(self, newcomer: "Connection") -> bool:
        crowd = [one for one in self.inside if one.house == newcomer.house]
        if len(crowd) < self.connections.most_each:
            crowd = self.inside if len(self.inside) >= self.most else None
        if crowd is not None:
            slow = [one for one in crowd if one.slow_for() > PATIENCE_SECONDS]
            if not slow:
                log.warning("a connection from %s was refused: %d are open", newcomer.house, len(self.inside))
                return False
            slowest = max(slow, key=Connection.slow_for)
            log.warning("a connection from %s made room: %d are open", slowest.house, len(self.inside))
            slowest.cut_off()
        self.inside.add(newcomer)
        return True


class Connection(H11Protocol):
    """uvicorn's own, but for the time that it gives."""

    def __init__(self, door: Door, **of_uvicorn: Any):
        super().__init__(**of_uvicorn)
        self.door, self.house = door, ""
        self._point, self._since, self._timer = "", 0.0, None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.house = house_of(self.client[0]) if self.client else ""
        if self.door.enter(self):
            self._look()
        else:
            transport.write(REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_timer(None)
        self.door.inside.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._look()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look()

    def timeout_keep_alive_handler(self) -> None:
        self.cut_off()

    def cut_off(self) -> None:
        """Without waiting for a client to read what it is still to get."""
        self.door.inside.discard(self)
        self.transport.abort()

    def slow_for(self) -> float:
        """How long it has waited for its client; 0 where the client waits for the server."""
        return 0.0 if self._point == "made" else time.monotonic() - self._since

    def _look(self) -> None:
        """Whether it has come to another point, of which the time begins. Bytes that trickle in are no progress."""
        point = self._now_at()
        if point != self._point:
            self._point, self._since = point, time.monotonic()
            self._set_timer(SECONDS.get(point))

    def _now_at(self) -> str:
        if self.transport.is_closing():
            return "end"
        if self.flow.write_paused:
            return "answer"
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            return "headers" if self.cycle is None or self.conn.trailing_data[0] else "idle"
        return "body" if theirs is h11.SEND_BODY else "made"

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self.cut_off)


def house_of(host: str) -> str:
    """One owner has many addresses of IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 6 and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host


def handles_left() -> int:
    """Connections that this process has file handles for."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return 2**31
    return max(allowed - len(os.listdir("/dev/fd")) - TAKEN_AT_ONCE - SPARE_HANDLES, FEWEST)
