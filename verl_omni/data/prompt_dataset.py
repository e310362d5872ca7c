"""Prompts from files, checked as a whole before anything else starts.

``prompt`` (text, or messages with one user turn) is all that a row needs. verl's layout has ``data_source`` (which
reward, where the settings name none) and ``reward_model`` (``{"style", "ground_truth"}``; a column ``ground_truth`` is
as good); optional are ``negative_prompt``, ``images``, ``agent_name``, ``extra_info``, and ``height``, ``width``,
``num_frames``, ``audio_duration_s`` where a prompt's samples are to have another size than the run's. All other columns
are handed on in
``extra_info``, under their names: there they reach the reward, and none can pass for a field of the run's own such as
``seed``. A key that ``extra_info`` has itself stays as it is.
A prompt is the user's text alone: the model's own template is added by its adapter.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from verl_omni.config.knob import MOST_IMAGES
from verl_omni.data.open_images import check_images
from verl_omni.data.prompt_files import read_files
from verl_omni.data.prompt_rows import SIZES, as_sample, user_text, valid_text

PIXELS, SECONDS = (int, 1, "a whole number, such as 512"), (int | float, 0.001, "a number of seconds, such as 2.5")
FROM = ("data_source", "reward_model", "ground_truth")  # what a row's reward is chosen and told by
UNSEEN = ("audios", "videos")  # verl's names of what language models are given with a prompt
MOST_LETTERS = 100_000  # of a prompt: no text encoder reads as many, and a tokenizer takes its time


class PromptDataset(Dataset):
    """All prompts of one or several files, in file order.

    ``config`` may name the prompt column (``prompt_key``). ``max_samples`` keeps the first so many prompts, -1 all.
    ``key`` is the setting that the files came from, so that an error can name it.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        config: Mapping[str, Any] | None = None,
        max_samples: int | None = -1,
        key: str = "data.train_files",
    ):
        self.prompt_key = (config or {}).get("prompt_key", "prompt")
        files = read_files(data_files, key)
        checked = (self.prompt_key, "negative_prompt", "extra_info", "agent_name", *FROM, *SIZES)
        self._sizes: dict[tuple, str] = {}
        for file in files:
            file.require(self.prompt_key)
            for name in ("data_source", "reward_model"):
                file.refuse_misspelt(name)
            for where, row in file.scan(checked):
                _check(row, self.prompt_key, where, file.columns)
                self._sizes.setdefault(tuple(row[name] for name in SIZES), where)

        self.columns = list(dict.fromkeys(column for file in files for column in file.columns))
        self._files, self._rows = files, torch.utils.data.ConcatDataset(files)
        total = len(self._rows)
        if max_samples is not None and max_samples != -1 and max_samples < 1:
            raise ValueError(f"the number of prompts to keep of {key} is {max_samples}: give 1 or more, or -1 for all")
        self._length = total if max_samples in (None, -1) else min(max_samples, total)

    def sizes(self) -> Iterator[tuple[str, dict[str, int]]]:
        """(where it first stands, what it says) of each size that rows ask for."""
        for values, where in self._sizes.items():
            asked = {name: value for name, value in zip(SIZES, values, strict=True) if value is not None}
            if asked:
                yield where, asked

    def check_images(self, least: int = 0, most: int = MOST_IMAGES, instead: str = "") -> None:
        """Every image of the column `images` is there and is one, and rows have so many, or one line names the row.

        `instead` is what to do about images where the model takes none.
        """
        for file in self._files:
            for where, row in file.scan(("images",), at_once=16) if "images" in file.columns else ():
                _check_images(row["images"], where)
                count = len(row["images"]) if isinstance(row["images"], list) else int(row["images"] is not None)
                if count and not most:
                    raise ValueError(f"{where}: images has {count}, and this model draws from prompts alone: {instead}")
                if not least <= count <= most:
                    some = f"{least} to {most}" if most < MOST_IMAGES else f"{least} or more"
                    wanted = str(least) if least == most else some
                    raise ValueError(f"{where}: images has {count}, and this model takes {wanted} with a prompt")

    def check_unseen(self) -> None:
        """No model here draws from a sound or a video: a row that has one would be drawn without it."""
        for file in self._files:
            for column in (name for name in UNSEEN if name in file.columns):
                for where, row in file.scan((column,), at_once=16):
                    if row[column]:
                        raise ValueError(
                            f"{where}: {column} is given, and no model takes {column} with a prompt: leave the column "
                            "out, or put it into extra_info under another name if a reward is to read it"
                        )

    def prompts(self) -> set[str]:
        """Each of its texts once, without a look at images."""
        return {user_text(row[self.prompt_key]) for file in self._files for _, row in file.scan((self.prompt_key,))}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self._length:
            raise IndexError(f"prompt {index} of {self._length}")
        row = self._rows[index]
        return {
            **as_sample(row, self.columns, self.prompt_key),
            "index": index,
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),  # verl's DataProto takes its length from a tensor
        }


def _check(row: dict, prompt_key: str, where: str, columns: Sequence[str]) -> None:
    """What a column holds in one row it has to hold in all: a gap is a mistake."""
    if "data_source" in columns and (not isinstance(row["data_source"], str) or not row["data_source"]):
        raise ValueError(f'{where}: data_source is missing; it names the reward, as in "ocr"')
    if row[prompt_key] is None:
        raise ValueError(f"{where}: {prompt_key} is missing")
    for column in (prompt_key, "negative_prompt"):
        try:
            text = user_text(row[column] if row[column] is not None else "")
        except ValueError as error:
            raise ValueError(f"{where}: {column}: {error}") from None
        if len(text) > MOST_LETTERS:
            raise ValueError(f"{where}: {column} has {len(text)} letters: expected at most {MOST_LETTERS}")
        if column == prompt_key and not text.strip():
            raise ValueError(f"{where}: {prompt_key} is empty")
    named = "reward_model" in columns
    reward = row["reward_model"] if named else {"ground_truth": row["ground_truth"]}
    if (named or "ground_truth" in columns) and (not isinstance(reward, dict) or reward.get("ground_truth") is None):
        raise ValueError(
            f'{where}: {"reward_model has no ground_truth" if named else "ground_truth is missing"}; expected '
            '{"style": "rule", "ground_truth": "the answer"}, with "" where the reward needs none'
        )
    if not isinstance(row["extra_info"], dict | None):
        raise ValueError(f'{where}: extra_info is {row["extra_info"]!r:.60}; expected an object, as in {{"index": 3}}')
    if not isinstance(row["agent_name"], str | None):
        raise ValueError(f"{where}: agent_name is {row['agent_name']!r:.60}; expected the name of an agent loop")
    for name in SIZES:
        if row[name] is None:
            continue
        kind, least, such = SECONDS if name == "audio_duration_s" else PIXELS
        if not isinstance(row[name], kind) or isinstance(row[name], bool) or not least <= row[name] < math.inf:
            raise ValueError(f"{where}: {name} is {row[name]!r:.60}; expected {such}")
    for name, value in (("data_source", row["data_source"]), ("ground_truth", reward["ground_truth"])):
        if isinstance(value, str):
            try:
                valid_text(value)
            except ValueError as error:
                raise ValueError(f"{where}: {name}: {error}") from None


def _check_images(column: Any, where: str) -> None:
    if not isinstance(column, str | bytes | dict | list | None):
        raise ValueError(f"{where}: images is {column!r:.60}; expected a list of paths or of encoded images")
    try:
        check_images(column)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
