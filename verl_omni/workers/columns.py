"""What a batch may hold. Each column is declared here, once; a new one is one more line.

What a model's `encode_prompt` returns, its conditions, is declared by where it comes from: a value for each sample,
which stays with the samples. What a loss asks for by name in `required_data_keys` and makes in `prepare_actor_batch` is
declared by that. Any other column is an error.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from verl.protocol import DataProto

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.utils.padding import pad_and_cat
from verl_omni.utils.suggest import unknown


@dataclass(frozen=True)
class Column:
    """Of a batch of B samples.

    `per`: one value for each `sample` (B, ...), for each denoising `step` (B, W, ...), for each noise `level`
    (B, K, ...), or for each `state` between steps (B, W + 1, ...); or for each `token` of a text, of which every sample
    has as many as it has.
    """

    name: str
    made_by: str
    read_by: str
    per: str = "sample"
    #: stays with whoever drew it, or goes by reference to who trains on it; the driver has only what is small
    large: bool = False
    #: goes to the training workers. Others are the driver's, unless a loss asks for one by name
    trained: bool = True
    #: is in the micro-batch that a loss sees; others say which rows those are, and how they count
    seen: bool = True
    #: is read on the host, and never waits for a device
    host: bool = False


DECLARED = {
    column.name: column
    for column in (
        # a denoising segment: what was drawn, and how
        Column("all_latents", "rollout", "replay", per="state", large=True, seen=False),
        Column("all_timesteps", "rollout", "replay", per="step"),
        Column("rollout_log_probs", "rollout", "loss", per="step", trained=False),
        Column("uncond_velocity", "rollout", "replay", per="step", large=True),
        Column("final_latents", "rollout", "replay", large=True, seen=False),
        Column("size", "rollout", "replay", host=True),
        Column("noise_level", "rollout", "replay", host=True),
        # a tokens segment: what was asked, what was written, and of which tokens each was chosen
        Column("text_prompt_ids", "rewriter", "replay", per="token", large=True, seen=False),
        Column("text_ids", "rewriter", "replay", per="token", large=True, seen=False),
        Column("text_log_probs", "rewriter", "loss", per="token", large=True, seen=False),
        Column("text_old_log_probs", "worker", "loss", per="token", large=True, seen=False),
        Column("text_positions", "rewriter", "replay", per="token", large=True, seen=False),
        Column("text_nucleus", "rewriter", "replay", per="token", large=True, seen=False),
        # under other policies
        Column("old_log_probs", "trainer or worker", "loss", per="step"),
        Column("old_prev_sample_mean", "rollout or worker", "loss", per="step", large=True),
        Column("ref_prev_sample_mean", "worker", "loss", per="step", large=True),
        Column("ref_shift", "worker", "loss", per="step", large=True),
        Column("teacher_prev_sample_mean", "worker", "loss", per="step", large=True),
        Column("teacher", "trainer", "worker", seen=False, host=True),
        Column("old_velocity", "worker", "loss", per="level", large=True),
        Column("ref_velocity", "worker", "loss", per="level", large=True),
        Column("ema_velocity", "worker", "loss", per="level", large=True),
        Column("teacher_velocity", "worker", "loss", per="level", large=True),
        # noise levels of clean samples
        Column("clean_latents", "data or rollout", "replay", large=True),
        Column("sigma", "trainer", "replay", per="level"),
        Column("noise_seed", "trainer", "replay", per="level", seen=False, host=True),
        Column("noise", "worker", "replay", per="level", large=True),
        Column("group", "trainer", "worker", seen=False, host=True),
        Column("group_sums", "worker", "loss", per="level"),
        # rewards, and what becomes of them
        Column("told", "trainer", "replay", host=True),
        Column("rm_scores", "rewards", "trainer", trained=False),
        Column("sample_level_rewards", "trainer", "trainer", trained=False),
        Column("score", "data", "trainer", trained=False),
        Column("advantages", "trainer", "loss", per="step"),
        Column("returns", "trainer", "loss", per="step", trained=False),
        Column("preference", "loss", "loss"),
        Column("rollout_is_weights", "trainer", "loss", per="step"),
        # the books
        Column("responses", "rollout", "rewards", large=True, trained=False),
        Column("sample", "agent loop", "trainer", trained=False),
        Column("sample_id", "trainer", "worker", seen=False, host=True),
        Column("train_steps", "trainer", "replay", seen=False, host=True),
        Column("share", "trainer", "replay", seen=False, host=True),
        Column("drawn_by", "trainer", "replay", seen=False, host=True),
        Column("mixed", "trainer", "replay", seen=False, host=True),
    )
}


def of(name: str) -> Column:
    """A declared column, or one of a model's conditions or of a loss: a value for each sample."""
    return DECLARED.get(name) or Column(name, "model or loss", "model or loss")


def is_replayed(name: str) -> bool:
    """Whether another policy needs it for its forwards of a stored sample. What the one that drew found is its own."""
    column = of(name)
    return column.read_by != "loss" and column.per != "token" and name != "uncond_velocity"


def check_drawn(names: Iterable[str]) -> None:
    """Refuse what an engine brings along with a sample and nobody has declared: nobody would read it."""
    for name in names:
        if name not in DECLARED:
            raise ValueError(unknown("column of a drawn sample", name, DECLARED))


def for_training(names: Iterable[str], asked: Iterable[str] = ()) -> list[str]:
    """Those of a batch's columns that go to the training workers; `asked` are the loss's own, or of cached samples."""
    names, asked = list(names), set(asked)
    for name in names:
        if name not in DECLARED and name not in asked:
            raise ValueError(unknown("column of a batch", name, DECLARED))
    return [name for name in names if name in asked or DECLARED[name].trained]


class Ragged:
    """A column whose rows lie each by itself. Those of a micro-batch are put together when they are taken from it.

    They may have several shapes, if rows that are taken together share one; those with a `length` are filled up to it
    behind their end.
    """

    def __init__(self, rows: list[torch.Tensor], length: int | None = None):
        self.rows, self.length = rows, length

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def device(self) -> torch.device:
        return self.rows[0].device

    def to(self, device: torch.device) -> "Ragged":
        return Ragged([row.to(device) for row in self.rows], self.length)

    def cpu(self) -> "Ragged":
        return self.to(torch.device("cpu"))

    def split(self, sizes: list[int]) -> list["Ragged"]:
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [Ragged(self.rows[end - size : end], self.length) for end, size in zip(ends, sizes, strict=True)]

    def unflatten(self, dim: int, shape: tuple[int, int]) -> "Ragged":
        """Rows (B * W) as (B, W): each sample's are of one shape."""
        assert dim == 0
        return Ragged([torch.stack(self.rows[i * shape[1] : (i + 1) * shape[1]]) for i in range(shape[0])])

    def __getitem__(self, index: int | torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if isinstance(index, int):
            return self.rows[index]
        if isinstance(index, tuple):
            rows, within = (places.tolist() for places in index)
            return torch.stack([self.rows[row][place] for row, place in zip(rows, within, strict=True)])
        chosen = [self.rows[row] for row in index.tolist()]
        return torch.stack(chosen) if self.length is None else _filled_up(chosen, self.length)


def _filled_up(rows: list[torch.Tensor], length: int) -> torch.Tensor:
    whole = rows[0].new_zeros(len(rows), length, *rows[0].shape[1:])
    for i, row in enumerate(rows):
        whole[i, : len(row)] = row
    return whole


def kept(name: str, rows: list[torch.Tensor]) -> Ragged:
    """One column of single samples' values, which stay where they are. Text features of different lengths are filled up
    to the longest of all of them, whoever is taken together."""
    column = DECLARED.get(name)
    if column is None and len({row.shape[1:] for row in rows}) == 1 and len({row.shape for row in rows}) > 1:
        return Ragged(rows, max(map(len, rows)))
    if column is not None and column.per not in ("sample", "token"):
        _check_lengths(name, rows)
    return Ragged(rows)


def near(batch: dict[str, torch.Tensor | Ragged], device: torch.device) -> dict[str, torch.Tensor | Ragged]:
    """A batch with what is small on the device, so that nobody waits for it there. The rest stays where it is: of that
    a micro-batch at a time goes to the device."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) and _is_small(name) else value
        for name, value in batch.items()
    }


def _is_small(name: str) -> bool:
    """Neither a large column nor one of the model's conditions, nor one that is read on the host."""
    column = DECLARED.get(name)
    return column is not None and not column.large and not column.host


def stacked(name: str, rows: list[torch.Tensor]) -> torch.Tensor | Ragged:
    """One column of single samples' values. Text features of different lengths are padded at their end."""
    column = DECLARED.get(name)
    if column is None and len({row.shape[1:] for row in rows}) == 1:
        return pad_and_cat([row[None] for row in rows])
    if column is not None and column.per == "token":
        return Ragged(rows)
    if column is not None and column.per != "sample":
        _check_lengths(name, rows)
    return as_they_are(rows)


def as_they_are(rows: list[torch.Tensor]) -> torch.Tensor | Ragged:
    """As one tensor, if they have one shape."""
    return torch.stack(rows) if len({row.shape for row in rows}) == 1 else Ragged(rows)


def concatenated(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """One column of several batches'. Text features of different lengths are padded at their end; nothing else is."""
    if name in DECLARED and DECLARED[name].per != "sample":
        _check_lengths(name, [part[0] for part in parts])
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if name in DECLARED and len(shapes) > 1:
        raise ValueError(
            f"samples of one batch have {name} of {' and '.join(map(str, shapes))}: expected one shape for all, as "
            "nothing may stand where a sample has nothing"
        )
    return pad_and_cat(parts)


def _check_lengths(name: str, rows: list[torch.Tensor]) -> None:
    """Zeros in place of steps that a sample does not have would be trained on."""
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        raise ValueError(
            f"samples of one batch have {' and '.join(map(str, lengths))} {DECLARED[name].per}s of {name}: expected "
            "one number for all, as with windows of one length"
        )


def note_mixed(batch: DataProto) -> DataProto:
    """Say on every row that rows of several sizes are trained together: all ranks know, whichever they have."""
    sizes = [batch.batch[name] for name in ("size", "noise_level") if name in batch.batch.keys()]
    if any((size != size[0]).any() for size in sizes):
        batch.batch["mixed"] = torch.ones(len(batch), dtype=torch.bool)
    return batch
