"""Prompts in the order of the data, as many at a time as are asked for."""

from typing import Any

from verl.protocol import DataProto

from verl_omni.data.prompt_loader import PromptDataLoader


class PromptStream:
    """Without an end. Where only a part of a batch has been taken, a run goes on in the midst of it."""

    def __init__(self, loader: PromptDataLoader):
        self._loader, self._batches = loader, iter(loader)
        self._batch: DataProto | None = None
        self._before: dict[str, Any] = {}
        self._taken = 0
        if loader.taken:
            self._open()
            self._taken = loader.taken

    def take(self, count: int | None = None) -> DataProto:
        """The next so many; as many as the data has in a batch."""
        if self._batch is None:
            self._open()
        parts, count = [], len(self._batch) if count is None else count
        while count:
            if self._batch is None:
                self._open()
            size = len(self._batch)
            rows = range(self._taken, min(self._taken + count, size))
            parts.append(self._batch if len(rows) == size else self._batch[list(rows)])
            self._taken, count = rows.stop, count - len(rows)
            if rows.stop == size:
                self._batch = None
        return parts[0] if len(parts) == 1 else DataProto.concat(parts)

    def _open(self) -> None:
        self._before, self._taken = self._loader.state_dict(), 0
        self._batch = DataProto.from_single_dict(next(self._batches))

    def state_dict(self) -> dict[str, Any]:
        """For the loader of a run that goes on from here."""
        return self._loader.state_dict() if self._batch is None else self._before | {"taken": self._taken}
