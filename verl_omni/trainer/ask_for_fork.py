"""Python as Ray starts it for a worker, by a process that has imported the libraries already (see `forked.py`).

    python -I -S ask_for_fork.py NAME [-u] FILE [ARGUMENT ...]

It is there as long as its fork is: who ends one of them ends the other. Where it gets none, it becomes Python itself:
that takes longer, and comes to the same. It has next to nothing to import.
"""

import _socket
import marshal
import os
import sys

KEY, KEY_SIZE = "VERL_OMNI_FORK_KEY", 32  # a variable; letters of its value
READY = b"."  # what a fork says when nothing can keep it from running


def ask(name: str, key: str, arguments: list[str]) -> _socket.socket:
    """The connection, on which a fork says that it is ready, and which ends with it."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.connect(f"\0{name}")
    wanted = marshal.dumps((arguments, dict(os.environ), os.getcwd()))
    streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
    head = key.encode() + len(wanted).to_bytes(4, "little")
    connection.sendmsg([head], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
    connection.sendall(wanted)
    return connection


if __name__ == "__main__":
    key = os.environ.pop(KEY, "")  # no worker has a use for it
    try:
        connection = ask(sys.argv[1], key, sys.argv[2:])
        ready = connection.recv(1)
    except OSError:  # nobody is there to ask
        ready = b""
    if ready != READY:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    try:
        connection.recv(1)
    except OSError:
        pass
