"""Drawing with a model that no rank holds whole: a forward of one rank gathers block after block from all of them.

Whoever wants a forward says so, and all ranks agree on whose turn it is: those that want the same part run it, others
only take part in the gathering. So ranks may draw different numbers of samples, of any size, in any number of steps.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from verl_omni.workers.layout import Layout

IDLE, OVER = 2**20, 2**20 + 1  # above any number of a part: who wants nothing now, and who will want nothing more
SHORTEST, LONGEST = 0.0005, 0.02  # seconds between two questions, while nobody wants anything


class InStep:
    """For each rank, a thread that answers the others as long as this one has no forward of its own."""

    def __init__(self, parts: Sequence[torch.nn.Module], device: torch.device, layout: Layout):
        """Ranks that hold another copy of the weights are not waited for."""
        self.parts, self.device = list(parts), device
        self.group = layout.group("weights", backend="gloo")
        self._state = threading.Condition()
        self._wants = self._runs = self._answers = self._over = False
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """On all ranks at about the same time."""
        hooks = []
        for number, part in enumerate(self.parts):
            hooks += [
                part.register_forward_pre_hook(lambda *_, number=number: self._begin(number), prepend=True),
                part.register_forward_hook(lambda *_: self._end(), always_call=True),  # after FSDP has freed its blocks
            ]
        self._over, self._error = False, None
        answering = threading.Thread(target=self._keep_company, name="in step", daemon=True)
        answering.start()
        try:
            yield
        finally:
            self._over = True
            answering.join()
            for hook in hooks:
                hook.remove()
        if self._error is not None:
            raise self._error

    def _begin(self, number: int) -> None:
        """Wait until it is the turn of this part; company is kept until then."""
        with self._state:
            self._wants = True
            self._state.wait_for(lambda: not self._answers)
            self._runs, self._wants = True, False
        while (chosen := self._agreed(number)) != number:
            keep_company(self.parts[chosen])

    def _end(self) -> None:
        with self._state:
            self._runs = False
            self._state.notify_all()

    def _keep_company(self) -> None:
        pause = SHORTEST
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                while (chosen := self._answer()) != OVER:
                    pause = SHORTEST if chosen < IDLE else min(LONGEST, 2 * pause)
                    if chosen >= IDLE:
                        time.sleep(pause)
        except BaseException as error:  # another rank is gone: whoever waits here has lost its connection too
            self._error = error

    @torch.no_grad()
    def _answer(self) -> int:
        with self._state:
            self._state.wait_for(lambda: not self._wants and not self._runs)
            self._answers = True
        try:
            chosen = self._agreed(OVER if self._over else IDLE)
            if chosen < IDLE:
                keep_company(self.parts[chosen])
            return chosen
        finally:
            with self._state:
                self._answers = False
                self._state.notify_all()

    def _agreed(self, wanted: int) -> int:
        told = torch.tensor(wanted)
        dist.all_reduce(told, dist.ReduceOp.MIN, group=self.group)
        return int(told)


@torch.no_grad()
def keep_company(part: torch.nn.Module) -> None:
    """What a forward of this part gathers, in its order, without computing anything."""
    around, *blocks = (module for module in part.modules() if isinstance(module, FSDPModule))
    around.unshard()
    for block in blocks:
        block.unshard()
        block.reshard()
    around.reshard()
