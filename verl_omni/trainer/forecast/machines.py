"""Which numbers of GPUs machines can give: `train` asks for as many on each."""

import math
from collections.abc import Iterator

Pool = tuple[int, int]  # machines, GPUs on each


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def on_machines(training: int, servers: int, size: int) -> tuple[Pool, Pool] | None:
    """Both on the fewest machines of that size that have so many GPUs, each on as few of them as go; None: they do not
    go there evenly."""
    machines = math.ceil((training + servers) / size)
    for train in _pools(training, machines, size):
        for draw in _pools(servers, machines, size):
            beside = train[1] + draw[1] <= size
            if beside or train[0] + draw[0] <= machines:
                return train, draw
    return None


def _pools(count: int, machines: int, size: int) -> Iterator[Pool]:
    if count == 0:
        yield 1, 0
    for nodes in divisors(count):
        if nodes <= machines and count // nodes <= size:
            yield nodes, count // nodes
