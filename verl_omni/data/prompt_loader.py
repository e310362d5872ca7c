"""The order in which prompts are trained on.

Training takes consecutive batches from one endless stream: epoch after epoch, each a permutation of all prompts that
depends on the seed alone. When the batch size does not divide the number of prompts, the batch at the seam holds the
last prompts of one epoch and the first of the next, so that

- nothing is dropped and no batch is short: after k epochs' worth of samples every prompt was seen exactly k times;
- no batch holds a prompt twice: those of the old epoch in the seam's batch come later in the new one.

A stopped run goes on exactly where it was: the order is replayed from the seed up to the saved batch. A sampler of the
user's own is asked for epoch after epoch in the same way, and replayed too.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn

from verl_omni.utils.seeds import derive_seed


class EpochStream(Sampler[list[int]]):
    """Endless batches of prompt numbers; see the module's description."""

    def __init__(self, num_prompts: int, batch_size: int, shuffle: bool, seed: int):
        if batch_size < 1:
            raise ValueError(f"data.train_batch_size={batch_size}: expected 1 or more")
        if batch_size > num_prompts:
            raise ValueError(
                f"data.train_batch_size={batch_size} is larger than the number of training prompts ({num_prompts}): "
                f"set data.train_batch_size={num_prompts} or less, or add prompts to data.train_files"
            )
        self.num_prompts, self.batch_size, self.shuffle, self.seed = num_prompts, batch_size, shuffle, seed

    def order(self) -> dict[str, int | bool]:
        """What the order depends on: a run that resumes has to have the same."""
        return {
            "number of prompts": self.num_prompts,
            "data.train_batch_size": self.batch_size,
            "data.shuffle": self.shuffle,
            "data.seed": self.seed,
        }

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "order of prompts"))
        left: list[int] = []  # prompts of the epoch that are still to come
        while True:
            batch, left = left[: self.batch_size], left[self.batch_size :]
            if len(batch) < self.batch_size:
                order = range(self.num_prompts)
                if self.shuffle:
                    order = torch.randperm(self.num_prompts, generator=generator).tolist()
                old = set(batch)
                new = [i for i in order if i not in old][: self.batch_size - len(batch)]
                batch, taken = batch + new, set(new)
                left = [i for i in order if i not in taken]
            yield batch


class SampledStream(Sampler[list[int]]):
    """Endless batches of the prompt numbers that a user's sampler gives, epoch after epoch.

    An epoch that ends (the sampler has a length) is drawn at once, with torch's generator seeded for it; a sampler with
    a `set_epoch` is told the epoch.
    """

    def __init__(self, sampler: Iterable[int], num_prompts: int, batch_size: int, seed: int):
        if batch_size < 1:
            raise ValueError(f"data.train_batch_size={batch_size}: expected 1 or more")
        self.sampler, self.num_prompts, self.batch_size, self.seed = sampler, num_prompts, batch_size, seed

    def order(self) -> dict[str, int | str]:
        return {
            "number of prompts": self.num_prompts,
            "data.train_batch_size": self.batch_size,
            "data.seed": self.seed,
            "train_sampler": type(self.sampler).__name__,
        }

    def __iter__(self) -> Iterator[list[int]]:
        numbers = self._numbers()
        while True:
            yield list(itertools.islice(numbers, self.batch_size))

    def _numbers(self) -> Iterator[int]:
        for epoch in itertools.count():
            number = None
            for number in self._epoch(epoch):
                yield int(number)
            if number is None:
                raise ValueError(f"train_sampler ({type(self.sampler).__name__}) gives no prompt at all")

    def _epoch(self, epoch: int) -> Iterable[int]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        if not hasattr(self.sampler, "__len__"):
            return self.sampler
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.seed, "train_sampler", epoch))
            return list(self.sampler)


class PromptDataLoader(StatefulDataLoader):
    """An endless, resumable loader of training batches. Refuses a state that was saved for another order of prompts.

    Keep one iterator for the whole run: ``iter`` starts from the beginning, or from a state just loaded. Of the first
    batch that it then gives, ``taken`` prompts have been used.
    """

    taken = 0

    def __init__(
        self, dataset: Dataset, stream: EpochStream | SampledStream, collate_fn: Callable = collate_fn, **kwargs
    ):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital.*")  # torchdata's, which nobody here can act on
            super().__init__(dataset, batch_sampler=stream, collate_fn=collate_fn, **kwargs)

    def state_dict(self) -> dict:
        return {"order": self.batch_sampler.order(), "loader": super().state_dict()}

    def order_changes(self, state: dict) -> list[str]:
        """Why a saved state is no place in this loader's order; nothing where it is one."""
        was, now = state["order"], self.batch_sampler.order()
        names = [name for name in was | now if was.get(name) != now.get(name)]
        return [f"{name} was {was.get(name)} and is {now.get(name)}" for name in names]

    def load_state_dict(self, state: dict) -> None:
        changed = self.order_changes(state)
        if changed:
            raise ValueError(
                f"cannot resume the order of prompts: {'; '.join(changed)}. Set it back, or start a new run"
            )
        super().load_state_dict(state["loader"])
        self.taken = state.get("taken", 0)


def create_dataloader(
    dataset: Dataset,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    collate_fn: Callable | None = None,
    sampler: Iterable[int] | None = None,
) -> PromptDataLoader:
    """Training batches without end; ``state_dict``/``load_state_dict`` resume exactly.

    ``sampler`` gives the numbers of the prompts of one epoch in place of ``shuffle``. To resume it has to give the same
    again in a new process: by a seed of its own, or by torch's generator, which is seeded for every epoch.
    """
    own = {} if collate_fn is None else {"collate_fn": collate_fn}
    if sampler is None:
        stream = EpochStream(len(dataset), batch_size, shuffle, seed)
    else:
        stream = SampledStream(sampler, len(dataset), batch_size, seed)
    return PromptDataLoader(dataset, stream, num_workers=num_workers, **own)


def create_val_dataloader(dataset: Dataset, batch_size: int | None = None, num_workers: int = 0) -> DataLoader:
    """Every prompt once, in file order; the last batch may be smaller. No ``batch_size``: all in one batch."""
    return DataLoader(
        dataset, batch_size=batch_size or len(dataset), shuffle=False, collate_fn=collate_fn, num_workers=num_workers
    )


def steps_for_epochs(num_prompts: int, batch_size: int, epochs: int) -> int:
    """How many training batches show every prompt at least ``epochs`` times."""
    return math.ceil(num_prompts * epochs / batch_size)
