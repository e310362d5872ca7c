"""Ranks as processes of their own."""

import multiprocessing
from collections.abc import Callable

from torch.multiprocessing.spawn import start_processes


def ready_to_fork() -> multiprocessing.context.ForkServerContext:
    """Its processes are forked from one that has imported the libraries, which takes longer than what ranks do here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["verl_omni.testing.local_trainer"])
    return context


def start_ranks(main: Callable[..., None], args: tuple, ranks: int = 2) -> None:
    """`main(rank, *args)` in each, until all have ended. Where one fails the others are ended too."""
    ready_to_fork()
    start_processes(main, args, nprocs=ranks, start_method="forkserver")
