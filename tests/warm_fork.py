"""Ask the process of `warm.py` for a Python process, and be there as long as it is: what Ray starts as its workers.

    python -I -S warm_fork.py SOCKET [-u] FILE [ARGUMENT ...]

Who ends this process ends the other one, and so does the end of who started it. It has next to nothing to import.
"""

import _socket
import marshal
import os
import select
import sys


def ask(
    address: str, arguments: list[str], environment: dict[str, str], folder: str, files: list[int]
) -> _socket.socket:
    """The connection. It says the process id, then the exit code, and is closed."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(address)
    wanted = marshal.dumps((arguments, environment, folder))
    rights = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
    connection.sendmsg([len(wanted).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
    connection.sendall(wanted)
    return connection


def number(connection: _socket.socket) -> int | None:
    """The next that is said; None: nobody is there any more."""
    data = b""
    while len(data) < 4:
        try:
            more = connection.recv(4 - len(data))
        except ConnectionError:
            return None
        if not more:
            return None
        data += more
    return int.from_bytes(data, "little", signed=True)


if __name__ == "__main__":
    connection = ask(sys.argv[1], sys.argv[2:], dict(os.environ), os.getcwd(), [0, 1, 2])
    started_by, pid, code = os.getppid(), number(connection), None
    while not select.select([connection], [], [], 1)[0]:
        if os.getppid() != started_by:
            os._exit(1)
    code = number(connection)
    if code is None:
        print(f"tests/warm.py has ended before the process that it forked ({pid}): {sys.argv[2:]}", file=sys.stderr)
    os._exit(1 if code is None else code if code >= 0 else 128 - code)
