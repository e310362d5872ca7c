"""What the house's HTTP servers do with a request: ask for the token, read a body of limited size, see who leaves."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import HTTPException, Request
from starlette.requests import ClientDisconnect

from verl_omni.utils.errors import Refused

T = TypeVar("T")
# A body that takes longer to arrive has lost its client: its place goes to another.
BODY_SECONDS = 60
# Longer than clients keep a connection that they do not use: else one may be closed while a request is on its way.
KEEP_ALIVE_SECONDS = 60
RETRY_AFTER = {"Retry-After": "1"}
NOBODY = 499  # the client has gone: nobody reads the answer


def asks_for(token: str | None) -> Callable[[Request], Awaitable[None]]:
    """For FastAPI's `Depends`: who does not send the token, where there is one, gets 401."""
    wanted = f"Bearer {token}".encode()

    async def with_token(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as they came
        if token is not None and not hmac.compare_digest(given, wanted):
            raise HTTPException(401, "this server wants its token: Authorization: Bearer ...")

    return with_token


async def read_body(request: Request, most: int, remedy: str) -> bytes:
    too_large = Refused(413, f"the request has more than {most} bytes: {remedy}")
    if int(request.headers.get("content-length", 0)) > most:
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > most:
                raise too_large
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), BODY_SECONDS)
    except asyncio.TimeoutError as error:
        raise Refused(408, f"the request did not arrive within {BODY_SECONDS} s") from error


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
