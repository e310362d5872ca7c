"""A server of scorers: FastAPI and uvicorn in one process, one thread a scorer."""

import asyncio
import hmac
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from verl_omni.rewards.serving.contract import Limits, Refused, Sample, decode
from verl_omni.rewards.serving.metrics import Metrics
from verl_omni.rewards.serving.queues import ScorerQueue
from verl_omni.utils.suggest import unknown

# A body that takes longer to arrive has lost its client: its place goes to another.
BODY_SECONDS = 60
# Longer than clients keep a connection that they do not use: else one may be closed while a request is on its way.
KEEP_ALIVE_SECONDS = 60
BACKLOG = 2048
RETRY_AFTER = {"Retry-After": "1"}
NOBODY = 499  # the client has gone; for the metrics, since nobody reads the answer


class RewardServer:
    """Takes its port at once, so that one which is in use is told before models are loaded.

    Who comes after `listen` waits for `run`; before it, connections are refused.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise OSError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', error)}") from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._uvicorn: uvicorn.Server | None = None
        self._stopped = threading.Event()

    def listen(self) -> None:
        self._socket.listen(BACKLOG)

    def run(
        self,
        scorers: Mapping[str, Callable[..., list[dict[str, Any]]]],
        *,
        token: str | None = None,
        max_batch: int = 16,
        queue_size: int = 256,
        limits: Limits | None = None,
        grace: float = 60,
    ) -> bool:
        """Serve until SIGTERM, Ctrl-C or `stop`, then finish what was asked, for `grace` seconds at most.

        Returns whether all of it was finished.
        """
        metrics = Metrics()
        queues = {name: ScorerQueue(name, scorer, max_batch, queue_size, metrics) for name, scorer in scorers.items()}
        app = make_app(queues, metrics, limits or Limits(), token)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                app,
                log_level="error",
                lifespan="off",
                backlog=BACKLOG,
                timeout_graceful_shutdown=grace,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self._uvicorn.should_exit = self._stopped.is_set()
        # uvicorn raises the signal again when it has finished: a stop that was asked for is no failure.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: None)
        self._uvicorn.run(sockets=[self._socket])
        return not app.state.cut_off

    def stop(self) -> None:
        """From any thread: take nothing new, finish what was asked."""
        self._stopped.set()
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True


def make_app(queues: Mapping[str, ScorerQueue], metrics: Metrics, limits: Limits, token: str | None) -> FastAPI:
    app = FastAPI(openapi_url=None)
    app.state.cut_off = False
    wanted = f"Bearer {token}".encode()

    async def with_token(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")  # the bytes as they came
        if token is not None and not hmac.compare_digest(given, wanted):
            raise HTTPException(401, "this server wants its token: Authorization: Bearer ...")

    guarded = [Depends(with_token)]

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/scorers", dependencies=guarded)
    async def names() -> dict[str, list[str]]:
        return {"scorers": list(queues)}

    @app.get("/metrics", dependencies=guarded)
    async def text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/score/{scorer}", dependencies=guarded)
    async def score(scorer: str, request: Request) -> Any:
        if scorer not in queues:
            raise HTTPException(404, unknown("scorer", scorer, queues))
        status = 500
        try:
            answers = await _scores(queues[scorer], request, limits)
            status = 200
            return JSONResponse({"scores": answers})
        except Refused as refused:
            status = refused.status
            raise HTTPException(status, refused.words, RETRY_AFTER if status == 503 else None) from refused
        except ClientDisconnect:
            status = NOBODY
            return Response(status_code=status)
        except asyncio.CancelledError as error:  # the server ends, and its time to finish is over
            app.state.cut_off, status = True, 503
            raise HTTPException(status, "the server was stopped before this was scored") from error
        finally:
            metrics.requests.labels(scorer, status).inc()

    return app


async def _scores(queue: ScorerQueue, request: Request, limits: Limits) -> list[dict[str, Any]]:
    with ExitStack() as places:
        # Before the body is read, so that bodies in memory are as few as places.
        places.enter_context(queue.places(1))
        body = await _body(request, limits.request_bytes)
        samples: list[Sample] = await asyncio.to_thread(decode, body, limits)
        del body
        if len(samples) > queue.size:
            raise Refused(413, f"{len(samples)} samples in a request, and the queue has {queue.size} places: send less")
        places.enter_context(queue.places(len(samples) - 1))
        return await _unless_gone(request, queue.score(samples))


async def _body(request: Request, most: int) -> bytes:
    too_large = Refused(413, f"the request has more than {most} bytes: send less, or raise --max-request-bytes")
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


async def _unless_gone(request: Request, answer: Awaitable[Any]) -> Any:
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
