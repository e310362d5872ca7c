"""Two ranks as processes of their own."""

import multiprocessing
from collections.abc import Callable

from torch.multiprocessing.spawn import start_processes


def ready_to_fork() -> multiprocessing.context.ForkServerContext:
    """Its processes are forked from one that has imported the libraries, which takes longer than what ranks do here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verl_omni.testing.local_trainer"])
    return context


def start_ranks(main: Callable[..., None], args: tuple) -> None:
    """`main(rank, *args)` in each, until both have ended."""
    ready_to_fork()
    start_processes(main, args, nprocs=2, start_method="forkserver")
