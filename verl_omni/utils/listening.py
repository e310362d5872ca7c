"""Where a server of ours listens, and who may come: this machine, or who knows the token."""

import ipaddress
import socket
from dataclasses import dataclass
from pathlib import Path

BACKLOG = 2048


@dataclass(frozen=True)
class Connections:
    """How many may be open: in all, and from one address (of IPv6: from one network of 64 bits)."""

    most: int = 512
    most_each: int = 256


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def take_port(host: str, port: int) -> socket.socket:
    """A socket that has this port (0: a free one) and does not listen yet; OSError in one line where it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
    except (OSError, OverflowError) as error:
        taken.close()
        raise OSError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', error)}") from error
    return taken


def address_of(taken: socket.socket, host: str) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{taken.getsockname()[1]}"


def token_in(file: str) -> str:
    """The token that a file holds."""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'the token file "{file}" cannot be read: {getattr(error, "strerror", error)}') from error
    if not token or len(token.split()) > 1:
        raise ValueError(f'the token file "{file}" holds no token: expected one word')
    return token
