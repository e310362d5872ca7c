"""Functions that stay where they were written: a run's processes ask for them by a call to this one.

A reward from a notebook is a closure over what is loaded there, and no file could hold it. The run's processes are
started from here and know the socket and its key by their environment; nobody else can call.
"""

import os
import pickle
import secrets
import tempfile
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any

ADDRESS, KEY = "VERL_OMNI_HOME", "VERL_OMNI_HOME_KEY"


class Home:
    """Answers calls of functions, by name, from other processes of this user, for as long as the `with` lasts."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]):
        self.functions = functions
        self._folder = tempfile.TemporaryDirectory(prefix="verl-omni-")
        self._key = secrets.token_bytes(32)
        self._listener = Listener(str(Path(self._folder.name, "home")), "AF_UNIX", backlog=128, authkey=self._key)

    @property
    def environment(self) -> dict[str, str]:
        """What a process has to know to call."""
        return {ADDRESS: self._listener.address, KEY: self._key.hex()}

    def __enter__(self) -> "Home":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._listener.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:  # closed
                return
            except Exception:  # noqa: BLE001, S112  (somebody without the key, or who left)
                continue
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            name, arguments = pickle.loads(connection.recv_bytes())  # from a process of this run: it knew the key
            try:
                answer = ("", self.functions[name](**arguments))
            except Exception as error:  # noqa: BLE001  (it is the caller's)
                answer = (type(error).__name__, str(error))
            connection.send_bytes(pickle.dumps(answer))


def call_home(name: str, arguments: dict[str, Any]) -> Any:
    """What the function of that name answers, in whichever process of the run this is."""
    with Client(os.environ[ADDRESS], "AF_UNIX", authkey=bytes.fromhex(os.environ[KEY])) as connection:
        connection.send_bytes(pickle.dumps((name, arguments)))  # `send` would share a tensor's memory, with other keys
        kind, answer = pickle.loads(connection.recv_bytes())
    if kind:
        raise known(kind)(answer)
    return answer


def known(kind: str) -> type[Exception]:
    """The exception of that name, to be made of a text; one of the user's own is not known here."""
    import builtins

    found = getattr(builtins, kind, None)
    if isinstance(found, type) and issubclass(found, Exception) and _takes_a_text(found):
        return found
    return type(kind, (RuntimeError,), {})


def _takes_a_text(kind: type[Exception]) -> bool:
    """Some want more than that, such as UnicodeDecodeError."""
    try:
        kind("")
    except TypeError:
        return False
    return True
