"""A page about runs while they train: images, curves, time, memory, and buttons to save or stop.

    verl-omni watch RUN|FOLDER [--port PORT] [--host HOST]

It reads the run's folder and starts nothing there: it may be started, ended and started again at any time.
"""

import argparse
import getpass
import socket
import sys
from pathlib import Path

from verl_omni.utils.options import Parser, at_least

PORT = 6060


def main() -> None:
    parser = Parser(
        "verl-omni watch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="RUN|FOLDER", help="a run's folder, or one with runs below it")
    parser.add_argument("--port", type=at_least(0, 65535), help=f"default: {PORT}, or a free one where that is taken")
    parser.add_argument(
        "--host", default="localhost", help="default: %(default)s; 0.0.0.0 lets in other machines that know the token"
    )
    options = parser.parse_args()
    folder = Path(options.folder).expanduser()
    if not folder.is_dir():
        sys.exit(f"error: {folder} is no folder: name a run's folder, or the one that runs are written to (outputs)")
    serve(folder, options.host, options.port)


def serve(folder: Path, host: str, port: int | None) -> None:
    import uvicorn

    from verl_omni.report.watch_server import new_token, watch_app
    from verl_omni.report.watched_runs import WatchedFolder
    from verl_omni.utils.http_door import guarded
    from verl_omni.utils.listening import BACKLOG, Connections, address_of, is_loopback

    try:
        listening = _take(host, port)
    except OSError as error:
        sys.exit(f"error: {error}; choose another with --port")
    watched, token = WatchedFolder(folder), new_token()
    listening.listen(BACKLOG)
    address = address_of(listening, host if is_loopback(host) else socket.gethostname())
    number = listening.getsockname()[1]
    runs = len(watched.runs())
    print(f"Watching {folder} ({runs or 'no'} run{'' if runs == 1 else 's'}{'' if runs else ' yet'}):")
    print(f"\n    {address}/?token={token}\n")
    if is_loopback(host):
        there = f"{getpass.getuser()}@{socket.gethostname()}"
        print(f"From another machine: ssh -N -L {number}:localhost:{number} {there}, and open the same address there.")
    print("Ctrl-C ends this page; runs go on.", flush=True)
    server = uvicorn.Server(guarded(watch_app(watched, host, token), Connections(), grace=1))
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass


def _take(host: str, port: int | None) -> socket.socket:
    from verl_omni.utils.listening import take_port

    if port is not None:
        return take_port(host, port)
    try:
        return take_port(host, PORT)
    except OSError:
        return take_port(host, 0)


if __name__ == "__main__":
    main()
