"""Which rollout server draws what: the samples of one forward stay together and go to the server with the least to do.

A forward has the same samples in it whichever server draws it, unless one dies. Those of one prompt follow one another:
they meet in one server, as far as a forward holds them. Only forwards that one agent-loop worker has to itself are
dealt so, and it knows only of its own.
"""

import asyncio
from collections import Counter, deque
from typing import Any

# Forwards that a worker has at a server: one is drawn, one waits. More would wait for one that may be slow, or die.
AHEAD = 2


class Block:
    """Samples that are drawn in one forward. `server` is known once `placed` is set."""

    def __init__(self, home: int, size: int, router: "Router | None" = None):
        """Without a router it is drawn by `home`."""
        self.home, self.left, self.router = home, size, router
        self.server, self.placed, self.moved = home, asyncio.Event(), False
        if router is None:
            self.placed.set()

    def answered(self) -> None:
        """One of its samples needs its place in the forward no longer."""
        self.left -= 1
        if self.router is not None and self.placed.is_set():
            self.router.freed(self)

    def elsewhere(self, server: int) -> bool:
        """That server has died. Whether another one draws what is missing."""
        if self.router is not None:
            self.router.died(server)
            self.router.move(self)
        return self.server != server


class Router:
    """Deals blocks to servers, in order. A server that has died gets none: it comes back for the next rollout."""

    def __init__(self, servers: int, most: int):
        """`most`: samples that a server has before it, unless a single block has more."""
        self.most, self.load = most, [0] * servers
        self._down: set[int] = set()
        self._waiting: deque[Block] = deque()

    def add(self, block: Block) -> None:
        self._waiting.append(block)
        self._deal()

    def freed(self, block: Block) -> None:
        self.load[block.server] -= 1
        self._deal()

    def died(self, server: int) -> None:
        self._down.add(server)

    def move(self, block: Block) -> None:
        if block.server in self._down and len(self._down) < len(self.load):
            self.load[block.server] -= block.left
            block.server, block.moved = self._least(block), True
            self.load[block.server] += block.left
            self._deal()

    def _deal(self) -> None:
        while self._waiting:
            block = self._waiting[0]
            server = self._least(block)
            if self.load[server] and self.load[server] + block.left > self.most:
                return
            self._waiting.popleft()
            self.load[server] += block.left
            block.server = server
            block.placed.set()

    def _least(self, block: Block) -> int:
        """Of those that live, if any does; the block's own where several have as little to do."""
        there = [s for s in range(len(self.load)) if s not in self._down] or [block.home]
        return min(there, key=lambda server: (self.load[server], server != block.home, server))


def blocks_of(rows: list[dict[str, Any]], servers: int, max_num_seqs: int, free: bool) -> list[Block]:
    """The block of each row. `free`: any server may draw it, if all of it is here; else the row's own does."""
    here = Counter(row["burst"] for row in rows)
    router, blocks = Router(servers, AHEAD * max_num_seqs), {}
    for row in sorted(rows, key=in_order):
        burst = row["burst"]
        if burst not in blocks:
            whole = here[burst] == forward_size(row, max_num_seqs)
            blocks[burst] = Block(row["server"], here[burst], router if free and whole else None)
            if free and whole:
                router.add(blocks[burst])
    return [blocks[row["burst"]] for row in rows]


def in_order(row: dict[str, Any]) -> tuple[int, int]:
    """The first forward of each server before the second of any."""
    _, server, forward = row["burst"]
    return forward, server


def forward_size(row: dict[str, Any], max_num_seqs: int) -> int:
    (_, _, forward), (_, total, *_) = row["burst"], row["position"]
    return min(max_num_seqs, total - forward * max_num_seqs)
