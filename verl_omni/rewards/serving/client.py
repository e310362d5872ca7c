"""Ask servers over HTTP and get every answer once: pooled connections, retries, several replicas, circuit breakers."""

import asyncio
import email.utils
import json
import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import urlsplit

from verl_omni.config.knob import MOST_SECONDS, MOST_TOKENS, MOST_TRIES, Range
from verl_omni.rewards.serving.replica import Replica
from verl_omni.utils.errors import RunError

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")
Seconds = Annotated[float, Range(above=0, most=MOST_SECONDS)]
Count = Annotated[int, Range(least=1, most=MOST_TOKENS)]
Retries = Annotated[int, Range(least=0, most=MOST_TRIES)]

# Seconds between tries: twice as many each time.
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_WAIT = 0.5, 30.0, 4.0
KEPT_SECONDS = 30  # a connection that nobody uses


class RewardServerError(RunError):
    """A server that gave no score. Its text is one line with the server's own words."""


class BadAnswer(Exception):
    """An answer that came and is none: what was wrong with it."""


class _Failed(Exception):
    """A try that may be repeated, after a pause or at once."""

    def __init__(self, words: str, *, pause: bool = True):
        super().__init__(words)
        self.pause = pause


class _Busy(_Failed):
    """The server is alive and has no time now: waiting for it costs no try, up to `timeout` seconds in all."""


class _Down(Exception):
    """No server can be asked now: waiting costs no try, until all have been down for `timeout` seconds."""


class HttpClient:
    """`ask_all(path, ...)` from any thread; all that happens on the wire happens in one event loop of its own."""

    def __init__(
        self,
        address: str,
        *,
        token_env: str | None,
        timeout: float,
        retries: int,
        concurrency: int,
        breaker_after: int,
        breaker_pause: float,
    ):
        self.replicas = [Replica(a, breaker_after, breaker_pause) for a in addresses(address)]
        self.timeout, self.retries, self.concurrency = timeout, retries, concurrency
        self._headers = {"Content-Type": "application/json"}
        if token_env is not None:
            self._headers["Authorization"] = f"Bearer {token_from(token_env)}"
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name="reward client", daemon=True).start()
        self._session = self._in_loop(self._open())
        self._places, self._well = asyncio.Semaphore(concurrency), asyncio.Event()
        weakref.finalize(self, _close, self._loop, self._session)

    def ask_all(self, path: str, bodies: list[Callable[[], bytes]], read: Callable[[Any], T]) -> list[T]:
        """POST each body, once it has its turn to be made; what `read` makes of each answer, in the same order.

        `read` gets the JSON of an answer and raises `BadAnswer` where it is none: then the question is asked again.
        Raises `RewardServerError` when one of them has got no answer.
        """
        return self._in_loop(self._ask_all(path, bodies, read))

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _open(self) -> "aiohttp.ClientSession":
        import aiohttp

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=self.concurrency, keepalive_timeout=KEPT_SECONDS),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers=self._headers,
        )

    async def _ask_all(self, path: str, bodies: list[Callable[[], bytes]], read: Callable[[Any], T]) -> list[T]:
        asking = [asyncio.ensure_future(self._ask(path, make_body, read)) for make_body in bodies]
        try:
            return await asyncio.gather(*asking)
        finally:
            for one in asking:  # after a failure nobody wants the others
                one.cancel()

    async def _ask(self, path: str, make_body: Callable[[], bytes], read: Callable[[Any], T]) -> T:
        body = replica = None
        tries, waits, waited = 0, 0, 0.0
        while tries <= self.retries:
            async with self._places:
                try:
                    self._choose(replica)
                    body = body or await asyncio.to_thread(make_body)
                    replica = self._choose(replica)
                    return await self._try(replica, path, body, read)
                except (_Failed, _Down) as failed:
                    why = failed
            if isinstance(why, _Down):
                await self._rest(waits, LONGEST_WAIT)
                waits += 1
            elif isinstance(why, _Busy) and waited < self.timeout:
                waited += await self._rest(waits, LONGEST_WAIT)
                waits += 1
            else:
                if why.pause and tries < self.retries:
                    await self._rest(tries, LONGEST_PAUSE)
                tries += 1
        counted = f"{tries} tries" if tries > 1 else "one try"
        raise RewardServerError(f"no score after {counted}; the last: {replica.address}{path}: {why}")

    def _choose(self, last: Replica | None) -> Replica:
        """The least loaded that may be asked, rather another than the last."""
        ready = [replica for replica in self.replicas if replica.may_be_asked()]
        if not ready:
            latest = min(self.replicas, key=Replica.down_for)
            if latest.down_for() > self.timeout:
                raise RewardServerError(f"{latest.address} was down for {self.timeout:g} s, the last: {latest.words}")
            raise _Down
        return min(ready, key=lambda r: (r is last, r.in_flight))

    async def _rest(self, number: int, longest: float) -> float:
        """Until a server is well again, or a pause is over; returns its seconds.

        It is random, so that not all come back at once, and not over before a server is ready.
        """
        pause = random.uniform(0.5, 1) * min(FIRST_PAUSE * 2**number, longest)
        began = time.monotonic()
        until_ready = min(replica.ready_at for replica in self.replicas) - began
        try:
            await asyncio.wait_for(self._well.wait(), max(pause, until_ready + 0.1 * pause))
        except asyncio.TimeoutError:
            pass
        return time.monotonic() - began

    async def _try(self, replica: Replica, path: str, body: bytes, read: Callable[[Any], T]) -> T:
        import aiohttp

        probe = replica.broken
        replica.trying |= probe
        replica.in_flight += 1
        try:
            async with self._session.post(replica.address + path, data=body, allow_redirects=False) as response:
                status, after, content = response.status, response.headers.get("Retry-After"), await response.read()
        except asyncio.TimeoutError as error:
            replica.failed(f"no answer within {self.timeout:g} s")
            raise _Failed(replica.words) from error
        except (aiohttp.ClientError, OSError) as error:
            replica.failed(f"{type(error).__name__}: {error}", down=True)
            raise (_Down() if probe else _Failed(replica.words)) from error
        finally:
            replica.in_flight -= 1
            if probe:
                replica.trying = False
        if status == 200:
            replica.answered()
            if probe:  # wakes all that rest now
                self._well.set()
                self._well.clear()
            return _read(content, read)
        words = f"{status} {own_words(content)}"
        if status < 500 and status != 429:
            replica.answered()
            raise RewardServerError(f"{replica.address}{path} answers {words}")
        wait = seconds(after)
        if wait is None:
            replica.failed(words)
            raise _Failed(words)
        if wait > self.timeout:
            asked = f"and asks to wait {wait:g} s, which is more than timeout={self.timeout:g}"
            raise RewardServerError(f"{replica.address}{path} answers {words}, {asked}")
        replica.busy(words, wait)
        raise _Busy(words)


def _read(content: bytes, read: Callable[[Any], T]) -> T:
    """An answer that cannot be read is asked for again, at once: the server is well."""
    try:
        answer = json.loads(content)
    except ValueError as error:
        raise _Failed(f"answered no JSON: {content[:200]!r}", pause=False) from error
    try:
        return read(answer)
    except BadAnswer as error:
        raise _Failed(str(error), pause=False) from error


def addresses(text: str) -> list[str]:
    """One or several, separated by commas or spaces."""
    found = [part.rstrip("/") for part in re.split(r"[,\s]+", text) if part]
    for address in found:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f'address="{address}": expected http://host:port or https://..., several with commas between'
            )
        if parts.username or parts.password:
            raise ValueError("address holds a password: name an environment variable with it in token_env instead")
    if not found:
        raise ValueError("address is empty: expected http://host:port")
    return found


def token_from(variable: str) -> str:
    token = os.environ.get(variable, "").strip()
    if not token:
        raise ValueError(f"token_env={variable}: there is no environment variable {variable}, or it is empty")
    return token


def seconds(retry_after: str | None) -> float | None:
    """Of a Retry-After, which is a number or a date."""
    if retry_after is None:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", retry_after.strip()):
        return float(retry_after)
    try:
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except ValueError:  # neither: as if it were not there
        return None


def own_words(content: bytes) -> str:
    """What a server says in the body of an error: ours under "detail", OpenAI's under "error", or as text."""
    text = content.decode(errors="replace")
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    while isinstance(said, dict):
        said = next((said[key] for key in ("detail", "error", "message") if said.get(key)), str(said))
    return " ".join(str(said).split())[:500] or "without a word"


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _close(loop: asyncio.AbstractEventLoop, session: "aiohttp.ClientSession") -> None:
    """When the client is no longer used, or the process ends."""
    closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
