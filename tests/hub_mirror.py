"""A small Hugging Face hub on loopback, for the hub's real client: repositories are folders, commits are names."""

import hashlib
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY = r"/(?:(datasets)/)?([^/]+/[^/]+)"


def commit(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


class Mirror(ThreadingHTTPServer):
    """`add` a folder as a repository; `break_after` bytes of a file the connection is lost, once."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[tuple[str, str], dict[str, Path]] = {}  # (kind, name) -> revision -> folder
        self.gated: set[str] = set()
        self.withheld: set[str] = set()  # files that it does not give out
        self.break_after: int | None = None
        self.asked: list[str] = []  # files whose content was sent
        self.bytes_sent = Counter()

    def add(self, name: str, folder: Path, revision: str = "main", kind: str = "model") -> str:
        """The commit that the revision now is."""
        sha = commit(f"{name} {folder}")
        self.repositories.setdefault((kind, name), {}).update({revision: folder, sha: folder})
        return sha


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Mirror

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+?)(?:/(revision|tree)/(.+))?", path):
            kind, name, what, revision = found.groups()
            self._about(kind, name, what, revision or "main")
        elif found := re.fullmatch(rf"{REPOSITORY}/resolve/([^/]+)/(.+)", path):
            kind, name, revision, file = found.groups()
            self._file("dataset" if kind else "model", name, revision, file)
        else:
            self._send(404, b"{}")

    do_HEAD = do_GET

    def _folder(self, kind: str, name: str, revision: str, gate: bool) -> Path | None:
        known = self.server.repositories.get((kind, name))
        if known is None:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif gate and name in self.server.gated and self.headers.get("Authorization") != "Bearer hf_good":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif revision not in known:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        else:
            return known[revision]
        return None

    def _about(self, kind: str, name: str, what: str | None, revision: str) -> None:
        folder = self._folder(kind, name, revision, gate=False)
        if folder is None:
            return
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if what == "tree":
            told = [
                {"type": "file", "path": path.relative_to(folder).as_posix(), "size": path.stat().st_size, "oid": "0"}
                for path in files
            ]
        else:
            names = [{"rfilename": path.relative_to(folder).as_posix()} for path in files]
            told = {"id": name, "sha": commit(f"{name} {folder}"), "siblings": names, "private": False}
        self._send(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

    def _file(self, kind: str, name: str, revision: str, file: str) -> None:
        folder = self._folder(kind, name, revision, gate=True)
        if folder is None:
            return
        if not (folder / file).is_file():
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        if file in self.server.withheld:
            self._send(403, b"{}")
            return
        content = (folder / file).read_bytes()
        about = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": commit(f"{name} {folder}"),
            "Accept-Ranges": "bytes",
        }
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range") or "bytes=0-") or [0, 0])[1])
        if self.command == "GET":
            self.server.asked.append(file)
        self._send(206 if start else 200, content[start:], about | {
            "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"
        } if start else about)  # fmt: skip

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        most = self.server.break_after
        if most is not None and len(body) > most:
            self.server.break_after = None
            self.wfile.write(body[:most])
            self.wfile.flush()
            self.server.bytes_sent[self.path] += most
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self.server.bytes_sent[self.path] += len(body)
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[Mirror]:
    mirror = Mirror()
    thread = threading.Thread(target=mirror.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        mirror.shutdown()
        mirror.server_close()


@pytest.fixture
def mirror(tmp_path, monkeypatch) -> Iterator[Mirror]:
    """A hub that this process, and those that it starts, take for the one; with an empty cache."""
    from huggingface_hub import constants

    from verl_omni.utils import hub

    with serving() as server:
        cache = tmp_path / "hf" / "hub"
        told = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        # What the client has read from the environment when it was imported.
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        hub._commit.cache_clear()
        yield server
        hub._commit.cache_clear()
