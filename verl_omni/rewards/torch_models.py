"""What rewards with a torch model share: settings, loading with errors in one line, and scoring in batches."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from verl_omni.config.knob import MOST_IMAGES, Range
from verl_omni.rewards.images import pictures_of
from verl_omni.utils.errors import RunError
from verl_omni.utils.hub import model_folder
from verl_omni.utils.model_code import refuse_code

if TYPE_CHECKING:
    import torch

Dtype = Literal["float32", "bfloat16", "float16"]
BatchSize = Annotated[int, Range(least=1, most=MOST_IMAGES)]
Frames = Annotated[int | None, Range(least=1, most=MOST_IMAGES)]


class BatchScorer:
    """A reward that scores parts of samples with a torch model, some at a time.

    A subclass loads its model in `__init__`, and says in `score` what some parts are worth.
    """

    needs_prompts = True

    def __init__(self, name: str, device: str | None, dtype: Dtype, batch_size: int):
        import torch

        self.name, self.batch_size = name, batch_size
        self.device, self.dtype = find_device(name, device), getattr(torch, dtype)
        # Tokenizers keep their padding in themselves: two threads must not use one at a time.
        self._lock = threading.Lock()

    def score(self, parts: list[Any], prompts: list[str]) -> dict[str, "torch.Tensor"]:
        """Columns with a number for each part, one of them "score"."""
        raise NotImplementedError

    def batched(self, parts: list[Any], function: Callable[[list[Any]], list[Any]]) -> list[Any]:
        """`function` of all parts, asked for some at a time."""
        import torch

        found = []
        for start in range(0, len(parts), self.batch_size):
            with self._lock, torch.inference_mode():
                found += function(parts[start : start + self.batch_size])
        return found

    def _scored(self, samples: list[list[Any]], prompts: list[str]) -> list[dict[str, float]]:
        """The mean over the parts of each."""
        pairs = [(part, prompt) for parts, prompt in zip(samples, prompts, strict=True) for part in parts]
        rows = iter(self.batched(pairs, self._rows))
        return [_mean([next(rows) for _ in parts]) for parts in samples]

    def _rows(self, pairs: list[tuple[Any, str]]) -> list[dict[str, float]]:
        columns = self.score([part for part, _ in pairs], [prompt for _, prompt in pairs])
        values = {name: column.double().tolist() for name, column in columns.items()}
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    def _checked_prompts(self, prompts: list[str] | None, count: int) -> list[str]:
        if not self.needs_prompts:
            return [""] * count
        if prompts is None or len(prompts) != count:
            given = "none" if prompts is None else len(prompts)
            raise ValueError(f'the reward "{self.name}" needs a prompt for each of {count} images, and got {given}')
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError(f'the reward "{self.name}" needs prompts, and that of image {index} is {prompt!r}')
        return prompts


class ModelScorer(BatchScorer):
    """A reward of single pictures. A video has the mean score of its frames."""

    def __init__(self, name: str, device: str | None, dtype: Dtype, batch_size: int, frames: int | None):
        super().__init__(name, device, dtype, batch_size)
        self.frames = frames

    def __call__(
        self,
        images: list,
        ground_truths: list | None = None,
        prompts: list[str] | None = None,
        extra_infos: list[dict] | None = None,
    ) -> list[dict[str, float]]:
        prompts = self._checked_prompts(prompts, len(images))
        return self._scored([pictures_of(image, self.frames) for image in images], prompts)


class SoundScorer(BatchScorer):
    """A reward of sounds: `parts` makes of one what the model takes, and the score is the mean over them."""

    def parts(self, audio: Any, sample_rate: int) -> list[Any]:
        raise NotImplementedError

    def __call__(
        self,
        audios: list,
        sample_rates: list[int],
        ground_truths: list | None = None,
        prompts: list[str] | None = None,
        extra_infos: list[dict] | None = None,
    ) -> list[dict[str, float]]:
        prompts = self._checked_prompts(prompts, len(audios))
        return self._scored([self.parts(*sound) for sound in zip(audios, sample_rates, strict=True)], prompts)


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def find_device(name: str, device: str | None) -> "torch.device":
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = f"reward.scorers.{name}.device={device}"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise RunError(f'{where}: expected "cuda", "cuda:<number>" or "cpu"') from error
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        seen = torch.cuda.device_count()
        raise RunError(f"{where}: this process sees {seen} GPUs; name one of them or cpu, or leave it null")
    return found


def load_pretrained(
    cls: Any, source: str, name: str, setting: str = "model", weights: bool = False, **options: Any
) -> Any:
    """`cls.from_pretrained(source)` for the setting of a reward: a folder, or a name on the Hugging Face hub."""
    try:
        place = Path(model_folder(source, weights=weights, setting=setting)).expanduser()
        if not place.is_dir():
            raise FileNotFoundError("there is no such folder")
        refuse_code_of(f'reward.scorers.{name}.{setting}="{source}"', place)
        return cls.from_pretrained(str(place), **options)
    except RunError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise RunError(cannot_load(name, setting, source, error, "the folder")) from error


def refuse_code_of(where: str, folder: str | Path) -> None:
    """Nothing in it is to be run."""
    try:
        refuse_code(folder, programs=True)
    except (OSError, ValueError) as error:
        raise RunError(f"{where}: {error}") from error


def load_model(cls: Any, source: str, name: str, dtype: "torch.dtype", setting: str = "model") -> Any:
    """The same for a model, all of whose weights have to be there: transformers would fill in random ones.

    They stay as they are: a gradient goes through a reward, and none to it.
    """
    options = {"dtype": dtype, "output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
    model, info = load_pretrained(cls, source, name, setting, weights=True, **options)
    lacking = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if lacking:
        where = f'reward.scorers.{name}.{setting}="{source}"'
        raise RunError(f"{where} is another model: it lacks, or has in another shape, {some(lacking)}")
    return model.requires_grad_(False)


def some(names: list[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def cannot_load(name: str, setting: str, source: str, error: Exception, instead: str) -> str:
    """One line for a setting whose model is not to be had: what to put there."""
    where = f"reward.scorers.{name}.{setting}"
    return (
        f'the reward "{name}" cannot load {where}="{source}" ({first_sentence(error)}): set {where} to {instead} of a '
        "downloaded copy, or let this machine reach the Hugging Face hub"
    )


def first_sentence(error: Exception) -> str:
    """Of what an exception says."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].split(". ")[0].strip().rstrip(".:")
