"""Python as Ray starts it for a worker, by a process that has imported the libraries already (see `forked.py`).

    python -I -S ask_for_fork.py NAME [-u] FILE [ARGUMENT ...]

It is there as long as its fork is: who ends one of them ends the other. It has next to nothing to import.
"""

import _socket
import marshal
import os
import sys


def ask(name: str, arguments: list[str]) -> _socket.socket:
    """The connection, which ends with the fork."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(f"\0{name}")
    wanted = marshal.dumps((arguments, dict(os.environ), os.getcwd()))
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    connection.sendmsg([len(wanted).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    connection.sendall(wanted)
    return connection


if __name__ == "__main__":
    try:
        connection = ask(sys.argv[1], sys.argv[2:])
    except OSError:  # nobody is there to ask: it takes longer, and comes to the same
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    try:
        connection.recv(1)
    except OSError:
        pass
