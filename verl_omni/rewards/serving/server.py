"""A server of scorers: FastAPI and uvicorn in one process, one thread a scorer."""

import asyncio
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

import verl_omni
from verl_omni.rewards.serving.contract import Limits, unpack
from verl_omni.rewards.serving.metrics import Metrics
from verl_omni.rewards.serving.openapi import BODY, RESPONSES
from verl_omni.rewards.serving.queues import DecodingRoom, ScorerQueue
from verl_omni.utils.errors import Refused
from verl_omni.utils.http_door import guarded
from verl_omni.utils.http_requests import NOBODY, RETRY_AFTER, BodyRoom, asks_for, read_body, unless_gone
from verl_omni.utils.listening import BACKLOG, Connections, address_of, take_port
from verl_omni.utils.suggest import unknown


class RewardServer:
    """Takes its port at once, so that one which is in use is told before models are loaded.

    Who comes after `listen` waits for `run`; before it, connections are refused.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0):
        self._socket = take_port(host, port)
        self.address = address_of(self._socket, host)
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
        connections: Connections | None = None,
        grace: float = 60,
    ) -> bool:
        """Serve until SIGTERM, Ctrl-C or `stop`, then finish what was asked, for `grace` seconds at most.

        Returns whether all of it was finished.
        """
        metrics, limits = Metrics(), limits or Limits()
        room = DecodingRoom(limits.decoded_bytes)
        queues = {
            name: ScorerQueue(name, scorer, max_batch, queue_size, room, metrics) for name, scorer in scorers.items()
        }
        app = make_app(queues, metrics, limits, token)
        self._uvicorn = uvicorn.Server(guarded(app, connections or Connections(), grace))
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
    # the pages that FastAPI would make of it load scripts from elsewhere
    app = FastAPI(title="verl-omni reward server", version=verl_omni.__version__, docs_url=None, redoc_url=None)
    app.state.cut_off = False
    with_token = [Depends(asks_for(token))]
    bodies, unpacking = BodyRoom(limits.waiting_bytes), asyncio.Lock()

    async def scores(queue: ScorerQueue, request: Request) -> list[dict[str, Any]]:
        queue.check_room()  # before the body is read; it takes a place when all of it is there
        with bodies.share() as share, ExitStack() as places:
            body = await read_body(request, limits.request_bytes, "send less, or raise --max-request-bytes", share)
            async with unpacking:  # one at a time: meanwhile a request is in memory several times
                samples = await asyncio.to_thread(unpack, body, limits)
            del body
            count = len(samples)
            if count > queue.size:
                raise Refused(413, f"{count} samples in a request, and the queue has {queue.size} places: send less")
            places.enter_context(queue.places(count))
            return await unless_gone(request, queue.score(samples))

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/v1/scorers", dependencies=with_token)
    async def names() -> dict[str, list[str]]:
        return {"scorers": list(queues)}

    @app.get("/metrics", dependencies=with_token)
    async def text() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/score/{scorer}", dependencies=with_token, openapi_extra=BODY, responses=RESPONSES)
    async def score(scorer: str, request: Request) -> Any:
        if scorer not in queues:
            raise HTTPException(404, unknown("scorer", scorer, queues))
        status = 500
        try:
            answers = await scores(queues[scorer], request)
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
