"""Drawing samples that no rank holds alone: of the ranks that share them one draws, and the others compute with it.

Whoever draws hands the inputs of each forward to the others of its group. They run it too, each on its share of the
tokens, as in training. Noise, prompts and decoding are the business of the one.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from verl_omni.workers.layout import Layout

OVER = None  # in the place of a part's number: there will be no further forward


class Together:
    def __init__(
        self,
        parts: Sequence[torch.nn.Module],
        layout: Layout,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager],
    ):
        """Collective: all ranks make one at the same time."""
        self.parts, self.device, self.autocast = list(parts), device, autocast
        rank = dist.get_rank()
        self.draws, self.first = layout.speaks(rank), rank - rank % layout.sequence
        self.described, _ = dist.new_subgroups(layout.sequence, backend="gloo")
        self.sent, _ = dist.new_subgroups(layout.sequence) if device.type != "cpu" else (self.described, None)
        self._error: BaseException | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """On all ranks of a group. The one that draws leaves first: the others wait for its word."""
        if not self.draws:
            self._error = None
            company = threading.Thread(target=self._keep_company, name="together", daemon=True)
            company.start()
            try:
                yield
            finally:
                company.join()
            if self._error is not None:
                raise self._error
            return
        hooks = [
            part.register_forward_pre_hook(
                lambda part, args, kwargs, number=number: self._hand_out(number, (args, kwargs)),
                with_kwargs=True,
                prepend=True,  # before anybody cuts or gathers anything
            )
            for number, part in enumerate(self.parts)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._tell((OVER, None, ()))

    def _hand_out(self, number: int, inputs: Any) -> None:
        leaves, tree = tree_flatten(inputs)
        tensors = [leaf.contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        others = [_Shape(leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._tell((number, tree, others))
        for tensor in tensors:
            dist.broadcast(tensor.detach().to(self.device), self.first, group=self.sent)

    def _keep_company(self) -> None:
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
                while (told := self._tell(None))[0] is not OVER:
                    self._compute(*told)
        except BaseException as error:  # told where the rollout ends; whoever draws waits in vain, as for a dead rank
            self._error = error

    @torch.no_grad()
    def _compute(self, number: int, tree: TreeSpec, leaves: list[Any]) -> None:
        leaves = [self._received(leaf) if isinstance(leaf, _Shape) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, tree)
        with self.autocast():
            self.parts[number](*args, **kwargs)

    def _received(self, shape: "_Shape") -> torch.Tensor:
        tensor = torch.empty(shape.shape, dtype=shape.dtype, device=self.device)
        dist.broadcast(tensor, self.first, group=self.sent)
        return tensor

    def _tell(self, what: Any) -> Any:
        """What the one that draws says, on each of its group."""
        said = [what]
        dist.broadcast_object_list(said, self.first, group=self.described)
        return said[0]


class _Shape:
    """In the place of a tensor."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype):
        self.shape, self.dtype = shape, dtype
