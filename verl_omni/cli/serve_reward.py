"""Serve rewards to runs on other machines, which ask for them with the reward `http`.

    verl-omni serve-reward ocr jpeg_compressibility --port 8123 --set ocr.num_threads=2

SIGTERM or Ctrl-C ends it when it has answered what it was asked. For more than one process, or one GPU each, start it
several times and give the runs all the addresses.
"""

import argparse
import os
import sys
from typing import Any

from verl_omni.rewards import check_package, check_settings, make_scorer
from verl_omni.rewards.registry import looks_at
from verl_omni.rewards.serving.contract import Limits
from verl_omni.utils.external_lib import import_external_lib
from verl_omni.utils.listening import Connections, is_loopback
from verl_omni.utils.options import Parser, at_least
from verl_omni.utils.suggest import unknown


def main() -> None:
    options = parse()
    try:
        finished = serve(options)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    if not finished:
        print(f"error: --grace {options.grace:g} s were over before all was scored", file=sys.stderr, flush=True)
        os._exit(1)  # a scorer that hangs would keep the process


def parse() -> argparse.Namespace:
    parser = Parser(
        "verl-omni serve-reward", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    limits, connections = Limits(), Connections()
    add = parser.add_argument
    add("scorers", nargs="+", metavar="scorer", help="registered rewards, such as ocr")
    add("--host", default="127.0.0.1", help="where to listen (%(default)s); beyond this machine only with a token")
    add("--port", type=at_least(0, 65535), default=8123, help="0 takes a free one (%(default)s)")
    add("--token-env", metavar="NAME", help="the environment variable with the token that clients must send")
    add("--set", action="append", default=[], metavar="SCORER.KEY=VALUE", help="a setting, as in reward.scorers")
    add("--external-lib", metavar="MODULE", help="your modules, or files x.py, that register rewards; comma between")
    add("--max-batch", type=at_least(1), default=16, help="samples for one call of a scorer (%(default)s)")
    add("--queue-size", type=at_least(1), default=256, help="samples of a scorer that may wait (%(default)s)")
    add("--max-request-bytes", type=at_least(1), default=limits.request_bytes, help="(%(default)s)")
    add("--max-image-bytes", type=at_least(1), default=limits.image_bytes, help="of one file (%(default)s)")
    add("--max-pixels", type=at_least(1), default=limits.pixels, help="of all images of a request (%(default)s)")
    add(
        "--max-waiting-bytes",
        type=at_least(1),
        default=limits.waiting_bytes,
        help="of all requests that are here, as they came (%(default)s)",
    )
    add(
        "--max-decoded-bytes",
        type=at_least(1),
        default=limits.decoded_bytes,
        help="of the images that are scored at a time (%(default)s)",
    )
    add("--max-connections", type=at_least(1), default=connections.most, help="in all (%(default)s)")
    add(
        "--max-connections-per-address",
        type=at_least(1),
        default=connections.most_each,
        help="from one machine (%(default)s)",
    )
    add("--grace", type=at_least(1), default=60, help="seconds to finish in after SIGTERM (%(default)s)")
    return parser.parse_args()


def serve(options: argparse.Namespace) -> bool:
    """Whether all that was asked has been answered."""
    from verl_omni.rewards.serving.client import token_from
    from verl_omni.rewards.serving.server import RewardServer

    limits = Limits(
        options.max_request_bytes,
        options.max_image_bytes,
        options.max_pixels,
        options.max_waiting_bytes,
        options.max_decoded_bytes,
    )
    import_external_lib(options.external_lib, "--external-lib")
    settings = read_settings(options.set, options.scorers)
    for name in options.scorers:
        check_settings(name, settings[name])
        check_package(name)
        if (seen := looks_at(name)) and "image" not in seen:
            raise ValueError(f"{name} asks for {', '.join(seen)}, and this server takes images and videos")
    token = token_from(options.token_env) if options.token_env else None
    if token is None and not is_loopback(options.host):
        raise ValueError(f"--host {options.host} lets other machines in: name a token for them with --token-env")
    server = RewardServer(options.host, options.port)
    print(f"loading {', '.join(options.scorers)}", file=sys.stderr, flush=True)
    scorers = {name: make_scorer(name, settings[name]) for name in options.scorers}
    server.listen()
    print(f"serving {', '.join(scorers)} at {server.address}", file=sys.stderr, flush=True)
    return server.run(
        scorers,
        token=token,
        max_batch=options.max_batch,
        queue_size=options.queue_size,
        limits=limits,
        connections=Connections(options.max_connections, options.max_connections_per_address),
        grace=options.grace,
    )


def read_settings(given: list[str], scorers: list[str]) -> dict[str, dict[str, Any]]:
    """`ocr.num_threads=2` as {"ocr": {"num_threads": 2}}, for every scorer."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for one in given:
        name, equals, _ = one.partition("=")
        if not equals or name.count(".") != 1:
            raise ValueError(f"--set {one}: expected SCORER.KEY=VALUE")
        if name.split(".")[0] not in scorers:
            raise ValueError(f"--set {one}: {unknown('scorer of this server', name.split('.')[0], scorers)}")
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist(given), resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"--set: {error}") from error
    return {name: tree.get(name, {}) for name in scorers}


if __name__ == "__main__":
    main()
