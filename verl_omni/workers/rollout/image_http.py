"""The policy in training, over HTTP: what OpenAI's image endpoint answers, drawn by a rollout server of any engine.

    GET  /health                 {"status": "ok", "version": 3}; needs no token; null: the weights have not come yet
    GET  /v1/models              the one model
    POST /v1/images/generations  {"prompt": "..."}  ->  {"created": ..., "version": 3, "data": [{"b64_json": ...}]}

An image is the one that validation draws for that prompt and seed, with the weights of `version`, and the seed comes
back with it. All but 200 comes with `{"error": {"message": "one line"}}`: 401 the token, 404 the model, 408 a body that
does not come, 413 too large, 422 what cannot be drawn, 500 an engine that failed, 503 with Retry-After where the
weights have not come yet or too many wait.

Who asks is a guest: training's batches stay as they are, and guests have every second one at most.
"""

import asyncio
import base64
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse

from verl_omni.config import DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.utils import responses
from verl_omni.utils.errors import Refused, RunError
from verl_omni.utils.http_door import guarded
from verl_omni.utils.http_requests import NOBODY, RETRY_AFTER, BodyRoom, asks_for, read_body, unless_gone
from verl_omni.utils.listening import BACKLOG, Connections, address_of, take_port
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.image_request import ImageRequest, RequestReader, http_token

BODY_BYTES, ALL_BODY_BYTES = 2**16, 2**23
# Requests that are drawn or wait for it; who comes then is told to come back.
PLACES = 16


class ImageHttp:
    """Lives in the event loop that `start` is called in, beside whatever else goes on there."""

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        model: DiffusionModelConfig,
        draw: Callable[..., Awaitable[RolloutOutput]],
        version: Callable[[], int | None],
    ):
        """`draw` is asked as an engine's `generate`; `version` is that of the weights, None while there are none."""
        self.http, self.draw, self.version = config.http, draw, version
        self.reader = RequestReader(config, model)
        self.model, self.adapter = model, self.reader.adapter
        self.address: str | None = None
        self._taken, self._tokenizing, self._since = 0, asyncio.Lock(), int(time.time())
        self._bodies = BodyRoom(ALL_BODY_BYTES)

    async def start(self, port: int) -> str:
        """Listen on that port (0: a free one); the address."""
        token = http_token(self.http)
        try:
            listening = take_port(self.http.host, port)
        except OSError as error:
            raise RunError(f"actor_rollout_ref.rollout.http.port: {error}; choose another") from error
        self.tokenizers = await asyncio.to_thread(self.adapter.load_tokenizers, self.model)
        connections = Connections(self.http.max_connections, self.http.max_connections_per_address)
        self._server = uvicorn.Server(guarded(self._app(token), connections, grace=1))
        listening.listen(BACKLOG)  # who comes before the server runs waits for it
        self._running = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        everywhere = self.http.host in ("0.0.0.0", "::")
        self.address = address_of(listening, socket.gethostname() if everywhere else self.http.host)
        return self.address

    async def stop(self) -> None:
        self._server.should_exit = True
        await self._running

    def _app(self, token: str | None) -> FastAPI:
        app = FastAPI(openapi_url=None)
        with_token = [Depends(asks_for(token))]

        @app.exception_handler(HTTPException)
        async def as_openai_says_it(request: Request, error: HTTPException) -> JSONResponse:
            kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
            said = {"message": error.detail, "type": kind, "param": None, "code": None}
            return JSONResponse({"error": said}, error.status_code, error.headers)

        @app.get("/health")
        async def health() -> dict[str, Any]:
            return {"status": "ok", "version": self.version()}

        @app.get("/v1/models", dependencies=with_token)
        async def models() -> dict[str, Any]:
            one = {"id": self.reader.name, "object": "model", "created": self._since, "owned_by": "verl-omni"}
            return {"object": "list", "data": [one]}

        @app.post("/v1/images/generations", dependencies=with_token)
        async def generations(request: Request) -> Any:
            try:
                with self._bodies.share() as share:
                    asked = self.reader.read(await read_body(request, BODY_BYTES, "send a shorter prompt", share))
                with self._place():
                    return JSONResponse(await unless_gone(request, self._images(asked)))
            except Refused as refused:
                headers = RETRY_AFTER if refused.status == 503 else None
                raise HTTPException(refused.status, refused.words, headers) from refused
            except ClientDisconnect:
                return Response(status_code=NOBODY)

        return app

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Until all is answered. Who is slow to send a request has none."""
        if self._taken == PLACES:
            raise Refused(503, f"{PLACES} requests wait already: come back later")
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1

    async def _images(self, asked: ImageRequest) -> dict[str, Any]:
        if self.version() is None:
            raise Refused(503, "the weights have not come yet: come back later")
        async with self._tokenizing:  # a tokenizer serves one thread at a time
            ids, negative = await asyncio.to_thread(self._tokens, asked)
        name, count = uuid.uuid4().hex, len(asked.seeds)
        try:
            drawn = await asyncio.gather(
                *(
                    self.draw(
                        prompt_ids=ids,
                        negative_prompt_ids=negative,
                        sampling_params=asked.sampling | {"seed": seed, "position": (i, count, name)},
                        request_id=f"{name}-{i}",
                        priority=1,
                    )
                    for i, seed in enumerate(asked.seeds)
                )
            )
            shown = await asyncio.to_thread(lambda: [as_json(one.response) for one in drawn])
        except Exception as error:  # whatever an engine or a codec raises: it goes on, and so does this server
            raise Refused(500, f"{type(error).__name__}: {one_line(error)}") from error
        data = [one | {"seed": seed} for one, seed in zip(shown, asked.seeds, strict=True)]
        return {"created": int(time.time()), "version": drawn[0].version, "data": data}

    def _tokens(self, asked: ImageRequest) -> list[list[int]]:
        limit = asked.sampling["max_sequence_length"]
        try:
            ids = self.adapter.tokenize(self.tokenizers, asked.prompt, limit)
            return [ids, self.adapter.tokenize_negative(self.tokenizers, asked.negative_prompt, limit)]
        except ValueError as error:  # too long for the model
            raise Refused(422, one_line(error)) from error


def as_json(response: responses.Response) -> dict[str, Any]:
    """A file as OpenAI has images; of what is none, its kind too. A text is a text."""
    kind = responses.kind_of(response)
    if kind.name == "text":
        return {"kind": kind.name, "text": response}
    file, ending = kind.file(response)
    told = {} if kind.name == "image" else {"kind": kind.name, "format": ending}
    return {"b64_json": base64.b64encode(file).decode()} | told


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:1000]
