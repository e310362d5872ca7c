"""The live page's server: what runs have written, and two wishes that can be left for them.

Who can reach a port of this machine may look; a wish needs the token. A browser is made to help nobody else: requests
that other sites cause are refused, and so are those to another name than this machine's, as a rebound one would be.
Where other machines are let in, all needs the token.
"""

import hmac
import json
import secrets
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_omni.report.assets import WEB
from verl_omni.report.watched_runs import WatchedFolder, WatchedRun
from verl_omni.utils.listening import is_loopback
from verl_omni.utils.run_files import SAVE, STOP

ASSETS = {
    **{name: "text/javascript" for name in ("uPlot.iife.min.js", "charts.js", "watch.js")},
    **{name: "text/css" for name in ("uPlot.min.css", "style.css", "watch.css")},
}
WISHES = {"stop": STOP, "save": SAVE}
MOST_BYTES = 2**12  # of a wish
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
# A report is a page of its own, and one that somebody else may have written: it can do nothing in our name.
REPORT_POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "media-src data:"
)


def watch_app(watched: WatchedFolder, host: str, token: str) -> ASGIApp:
    """The page and what it asks for, behind the gate."""
    pages = _Pages(watched)
    routes = [
        Route("/", pages.page),
        Route("/assets/{name}", pages.asset),
        Route("/api/runs", pages.runs),
        Route("/api/run", pages.run),
        Route("/api/samples", pages.samples),
        Route("/api/log", pages.log),
        Route("/picture", pages.picture),
        Route("/report", pages.report),
        Route("/api/wish", pages.wish, methods=["POST"]),
    ]
    return Gate(Starlette(routes=routes, exception_handlers={HTTPException: _refusal}), host, token)


def new_token() -> str:
    return secrets.token_urlsafe(18)


class Gate:
    """Who is let in. It stands before everything, so that no page can be forgotten."""

    def __init__(self, app: ASGIApp, host: str, token: str):
        self.app, self.token = app, token
        self.local = is_loopback(host)
        self.names = {"localhost", "127.0.0.1", "[::1]", host}
        self.cookie = f"watch_{secrets.token_hex(4)}"  # ports of one machine share their cookies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(scope)
        with_token = self._has_token(request)
        if refusal := self._refusal(request, with_token):
            status, line = refusal
            await JSONResponse({"error": line}, status, HEADERS)(scope, receive, send)
            return
        scope["state"] = {"may_ask": with_token}

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if with_token and "token" in request.query_params:
                    headers.append("Set-Cookie", f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await self.app(scope, receive, send_guarded)

    def _has_token(self, request: Request) -> bool:
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        given = [bearer, request.query_params.get("token", "")]
        if request.method == "GET" or "origin" in request.headers:  # a browser sends a cookie for others too
            given.append(request.cookies.get(self.cookie, ""))
        return any(hmac.compare_digest(one.encode(), self.token.encode()) for one in given)

    def _refusal(self, request: Request, with_token: bool) -> tuple[int, str] | None:
        host = request.headers.get("host", "")
        if self.local and _name(host) not in self.names:
            return 421, f"this page is at localhost, not at {host[:100]}"
        if not self.local and not with_token:
            return 401, "open the address with its token, as `verl-omni watch` printed it"
        if request.method in ("GET", "HEAD"):
            return None
        origin, site = request.headers.get("origin"), request.headers.get("sec-fetch-site", "same-origin")
        if site != "same-origin" or (origin is not None and urlsplit(origin).netloc != host):
            return 403, "another site may not ask for this"
        if not with_token:
            return 401, "open the address with its token, as `verl-omni watch` printed it"
        return None


class _Pages:
    """One answer at a time: what has been read is shared."""

    def __init__(self, watched: WatchedFolder):
        self.watched, self.lock = watched, threading.Lock()

    def page(self, request: Request) -> Response:
        return FileResponse(WEB / "watch.html", media_type="text/html")

    def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404, "no such file")
        return FileResponse(WEB / name, media_type=ASSETS[name])

    def runs(self, request: Request) -> Response:
        with self.lock:
            runs = [_told(run.name, run.brief) for run in self.watched.runs().values()]
        return JSONResponse({"folder": str(self.watched.dir), "may_ask": request.state.may_ask, "runs": runs})

    def run(self, request: Request) -> Response:
        return self._answer(request, lambda run: run.whole())

    def samples(self, request: Request) -> Response:
        kind, step = request.query_params.get("kind"), request.query_params.get("step", "")
        if kind not in ("validation", "training") or not step.isdecimal():
            raise HTTPException(400, "expected kind=validation or training, and step=N")
        return self._answer(request, lambda run: run.samples(kind, int(step)))

    def log(self, request: Request) -> Response:
        return self._answer(request, lambda run: {"text": run.log()})

    def picture(self, request: Request) -> Response:
        try:
            path, kind = self._run(request).picture(request.query_params.get("file", ""))
        except ValueError as error:
            raise HTTPException(404, str(error)) from error
        return FileResponse(path, media_type=kind)

    def report(self, request: Request) -> Response:
        path = self._run(request).dir / "report.html"
        if path.is_symlink() or not path.is_file():
            raise HTTPException(404, "this run has no report yet")
        return FileResponse(path, media_type="text/html", headers={"Content-Security-Policy": REPORT_POLICY})

    async def wish(self, request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                raise HTTPException(413, "expected a small JSON object")
        try:
            wish = json.loads(body)
            file, name = WISHES[wish["what"]], wish["run"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HTTPException(422, 'expected {"run": NAME, "what": "stop" or "save"}') from error
        with self.lock:
            run = self.watched.runs().get(name)
            if run is None:
                raise HTTPException(404, "there is no such run")
            if not run.ask(file):
                raise HTTPException(409, f"nobody would see that: the run is {run.state.line}")
        return JSONResponse({"asked": wish["what"]})

    def _run(self, request: Request) -> WatchedRun:
        with self.lock:
            run = self.watched.runs().get(request.query_params.get("run", ""))
        if run is None:
            raise HTTPException(404, "there is no such run")
        return run

    def _answer(self, request: Request, read: Callable[[WatchedRun], Any]) -> Response:
        run = self._run(request)
        with self.lock:
            try:
                return JSONResponse(read(run))
            except (OSError, ValueError) as error:  # a file that is damaged, or was taken away meanwhile
                raise HTTPException(422, str(error)[:500]) from error


def _told(name: str, brief: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A run that cannot be read does not hide the others."""
    try:
        return brief()
    except (OSError, ValueError) as error:
        return {"name": name, "error": str(error)[:500]}


def _name(host: str) -> str:
    """`localhost` of `localhost:6007`, `[::1]` of `[::1]:6007`."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0].lower()


async def _refusal(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse({"error": error.detail}, error.status_code)
