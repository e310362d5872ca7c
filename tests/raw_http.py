"""A client of HTTP that can be slow: what it sends is up to the test, byte by byte."""

import re
import socket
from types import TracebackType
from urllib.parse import urlsplit

GUARD = 60


class RawClient:
    def __init__(self, address: str, source: str = "127.0.0.1"):
        parts = urlsplit(address)
        self.socket = socket.create_connection((parts.hostname, parts.port), GUARD, source_address=(source, 0))

    def __enter__(self) -> "RawClient":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.socket.close()

    def begin(self, path: str, length: int, *headers: str) -> "RawClient":
        """A request whose body is still to come."""
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers, "", ""]
        return self.send("\r\n".join(lines).encode())

    def send(self, data: bytes) -> "RawClient":
        self.socket.sendall(data)
        return self

    def answer(self) -> bytes:
        """A whole one, with its headers; nothing where the server has closed the connection."""
        got = b""
        try:
            while not _whole(got):
                part = self.socket.recv(2**16)
                if not part:
                    break
                got += part
        except ConnectionResetError:
            pass
        return got


def _whole(got: bytes) -> bool:
    headers, end, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", headers, re.IGNORECASE)
    return bool(end) and len(body) == int(length[1])
