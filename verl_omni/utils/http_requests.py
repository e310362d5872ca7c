"""What the house's HTTP servers do with a request: ask for the token, read a body within limits, see who leaves."""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from verl_omni.utils.errors import Refused
from verl_omni.utils.json_bodies import MarkCounter

T = TypeVar("T")
# A body that takes longer to arrive has lost its client.
BODY_SECONDS = 60
# Who lets a server wait for longer is slow, and makes room for others where there is too little.
PATIENCE_SECONDS = 1.0
RETRY_AFTER = {"Retry-After": "1"}
NOBODY = 499  # the client has gone: nobody reads the answer


def asks_for(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """For FastAPI's `Depends`: who does not send the token, where there is one, gets 401. No body is read for it."""
    wanted = f"Bearer {token}".encode()

    async def with_token(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as they came
        if token is not None and not hmac.compare_digest(given, wanted):
            raise HTTPException(401, "this server wants its token: Authorization: Bearer ...")

    return with_token


class BodyRoom:
    """Bytes for the bodies of all requests together."""

    def __init__(self, size: int):
        self.size, self.taken = size, 0
        self._shares: set[_Share] = set()

    @contextmanager
    def share(self) -> Iterator["_Share"]:
        """What one request takes, until it is answered."""
        share = _Share(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)
            self.taken -= share.taken

    def make(self, size: int, newcomer: "_Share") -> bool:
        """Room for so many bytes more, where others that are slow to send can give it up."""
        while self.taken + size > self.size:
            slow = [one for one in self._shares if one is not newcomer and one.slow_for() > PATIENCE_SECONDS]
            if not slow:
                return False
            slowest = max(slow, key=_Share.slow_for)
            slowest.reading.cancel()
            slowest.reading = None
            self.taken, slowest.taken = self.taken - slowest.taken, 0
        return True


class _Share:
    def __init__(self, room: BodyRoom):
        self.room, self.taken = room, 0
        self.reading: asyncio.Future | None = None
        self.since = time.monotonic()

    def slow_for(self) -> float:
        return 0.0 if self.reading is None or not self.taken else time.monotonic() - self.since

    def take(self, size: int) -> None:
        if not self.room.make(size, self):
            raise Refused(503, f"requests of {self.room.taken} bytes are here already: come back later")
        self.room.taken += size
        self.taken += size


async def read_body(request: Request, most: int, remedy: str, share: _Share) -> bytearray:
    """JSON of at most so many bytes; each is counted when it is there, so that who sends nothing takes nothing."""

    def check(size: int) -> None:
        if size > most:
            raise Refused(413, f"the request has more than {most} bytes: {remedy}")

    async def read() -> bytearray:
        body, marks = bytearray(), MarkCounter()
        try:
            async for chunk in request.stream():
                check(len(body) + len(chunk))
                marks.add(chunk)
                share.take(len(chunk))
                body += chunk
        except BaseException:
            body.clear()  # the error knows this frame, and may live for longer than the share
            raise
        return body

    check(int(request.headers.get("content-length", 0)))
    reading = share.reading = asyncio.ensure_future(read())
    try:
        await asyncio.wait({reading}, timeout=BODY_SECONDS)
        if reading.cancelled():
            raise Refused(503, "the request was slow to arrive and made room for others: come back later")
        if not reading.done():
            raise Refused(408, f"the request did not arrive within {BODY_SECONDS} s")
        return reading.result()
    finally:
        share.reading = None
        reading.cancel()


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """The answer, or ClientDisconnect as soon as nobody waits for it."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(request.receive())  # after the body only a disconnect can come
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise ClientDisconnect
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
