"""Drawing samples that no rank holds alone: of the ranks that share them one draws, and the others compute with it.

Whoever draws hands the inputs of each forward to the others of its group. They run it too, each on its share of the
tokens, as in training. Noise, prompts and decoding are the business of the one.

A forward that fails on one rank leaves the others waiting for it within theirs. It says so in the store where ranks
met: all of them look there, and leave what they wait in. The one that draws raises it; weights can still be saved.
"""

import contextlib
import functools
import json
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from verl_omni.perf.memory import names_memory_knobs
from verl_omni.workers.layout import Layout

OVER = None  # in the place of a part's number: there will be no further forward
# How long ranks on CPUs wait for each other within a forward: gloo cannot be told to stop, which NCCL can.
PATIENCE = timedelta(seconds=120)
LOOK = 0.25  # seconds between two looks at whether another rank has failed


class Together:
    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        layout: Layout,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager],
        groups: Sequence[dist.ProcessGroup],
        patience: timedelta = PATIENCE,
    ):
        """Collective: all ranks make one at the same time. `groups` are those in which the parts' forwards meet."""
        self.parts, self.device, self.autocast, self.patience = list(parts), device, autocast, patience
        self.rank = dist.get_rank()
        self.draws, self.first = layout.speaks(self.rank), layout.speaker(self.rank)
        # The others wait for a word as long as there is none. For them it waits until they have given up a forward.
        word = 2 * patience if self.draws else None
        self.described = layout.group("sequence", backend="gloo", timeout=word)
        self.sent = layout.group("sequence", timeout=patience if device.type == "cpu" else None)
        self.groups = [self.sent, *groups]
        store = distributed_c10d._get_default_store()
        self.board = dist.PrefixStore(f"together/{self.described.group_name}", store)
        self._rollouts, self._leaving = 0, threading.Lock()
        self._error: BaseException | None = None
        self._raised = self._left = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """On all ranks of a group. The one that draws leaves first: the others wait for its word."""
        self._rollouts += 1
        self._error, self._raised, self._left = None, False, False
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=(over,), name="together, watching", daemon=True)
        watching.start()
        try:
            with self._patient(), self._drawing() if self.draws else self._company():
                yield
        finally:
            over.set()
            watching.join()

    @contextlib.contextmanager
    def _patient(self) -> Iterator[None]:
        waiting = [] if self.device.type != "cpu" else self.groups[1:]
        try:
            for group in waiting:
                distributed_c10d._set_pg_timeout(self.patience, group)
            yield
        finally:
            for group in waiting:
                distributed_c10d._set_pg_timeout(dist.default_pg_timeout, group)

    # ---- the one that draws --------------------------------------------------------------------------

    @contextlib.contextmanager
    def _drawing(self) -> Iterator[None]:
        try:
            with contextlib.ExitStack() as wrapped:
                for number, part in enumerate(self.parts):
                    wrapped.enter_context(self._handing_out(number, part))
                yield
        finally:
            self._tell((OVER, None))
        if not self._raised:  # of the last forward, after all that others had to wait for
            self._refuse_failed()

    @contextlib.contextmanager
    def _handing_out(self, number: int, part: torch.nn.Module) -> Iterator[None]:
        """Within the part's hooks: what they refuse, nobody else has heard of."""
        forward, own = part.forward, vars(part).get("forward")

        @functools.wraps(forward)
        def together(*args: Any, **kwargs: Any) -> Any:
            self._refuse_failed()
            try:
                self._hand_out(number, (args, kwargs))
                output = forward(*args, **kwargs)
            except BaseException as error:
                self._raised = True
                failed = self._fail(error)
                if failed is None:
                    raise
                raise failed.as_error() from error
            self._refuse_failed()  # a GPU's collective that was left returns anything
            return output

        part.forward = together
        try:
            yield
        finally:
            if own is None:
                del part.forward
            else:
                part.forward = own

    def _refuse_failed(self) -> None:
        failed = self._failed()
        if failed is not None:
            self._raised = True
            raise failed.as_error()

    def _hand_out(self, number: int, inputs: Any) -> None:
        tensors: list[torch.Tensor] = []

        def shape(tensor: torch.Tensor) -> _Shape:
            tensors.append(tensor)
            return _Shape(tensor.shape, tensor.dtype, tensor.device.type)

        self._tell((number, tree_map_only(torch.Tensor, shape, inputs)))
        for tensor in tensors:
            dist.broadcast(tensor.detach().contiguous().to(self.device), self.first, group=self.sent)

    # ---- the others ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _company(self) -> Iterator[None]:
        company = threading.Thread(target=self._keep_company, name="together", daemon=True)
        company.start()
        try:
            yield
        finally:
            company.join(dist.default_pg_timeout.total_seconds())
        if company.is_alive():
            raise TimeoutError(f"rank {self.first}, which draws, has not said that it is over")
        if self._error is not None:
            raise self._error

    def _keep_company(self) -> None:
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                while (told := self._tell(None))[0] is not OVER:
                    if self._failed() is None:
                        self._compute_or_say(*told)
        except BaseException as error:  # whoever draws is gone
            self._error = error

    def _compute_or_say(self, number: int, inputs: Any) -> None:
        """An error is raised by the one that draws. Here its words are still to be heard, until it is over."""
        try:
            self._compute(number, inputs)
        except BaseException as error:
            if self._fail(error) is None:
                traceback.print_exception(error)
                print(_Failed.of(self.rank, error).as_error(), file=sys.stderr, flush=True)

    @names_memory_knobs("rollout")
    @torch.no_grad()
    def _compute(self, number: int, inputs: Any) -> None:
        args, kwargs = tree_map_only(_Shape, self._received, inputs)
        with self.autocast():
            self.parts[number](*args, **kwargs)

    def _received(self, shape: "_Shape") -> torch.Tensor:
        tensor = torch.empty(shape.shape, dtype=shape.dtype, device=self.device)
        dist.broadcast(tensor, self.first, group=self.sent)
        return tensor.to(shape.device)

    # ---- all of them ---------------------------------------------------------------------------------

    def _tell(self, what: Any) -> Any:
        """What the one that draws says, on each of its group."""
        said = [what]
        dist.broadcast_object_list(said, self.first, group=self.described)
        return said[0]

    def _failed(self) -> "_Failed | None":
        """Who has failed in this rollout."""
        key = str(self._rollouts)
        return _Failed(**json.loads(self.board.get(key))) if self.board.check([key]) else None

    def _fail(self, error: BaseException) -> "_Failed | None":
        """Say so and leave, or who had failed before: then this is what comes of it."""
        before = self._failed()
        if before is None:
            self.board.set(str(self._rollouts), json.dumps(vars(_Failed.of(self.rank, error))))
        self._leave()
        return before

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(LOOK):
            if self._failed() is not None:
                self._leave()
                return

    def _leave(self) -> None:
        """Whatever waits here for another rank in a forward is to end."""
        with self._leaving:
            if not self._left:
                self._left = True
                for group in self.groups:
                    group.abort()


@dataclass(frozen=True)
class _Shape:
    """In the place of a tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class _Failed:
    rank: int
    text: str
    memory: bool

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "_Failed":
        said = f"failed to compute its share of a sample: {type(error).__name__}: {' '.join(str(error).split())}"
        return cls(rank, said, isinstance(error, torch.OutOfMemoryError))

    def as_error(self) -> Exception:
        text = f"rank {self.rank} {self.text}"
        return torch.OutOfMemoryError(text) if self.memory else RuntimeError(text)
