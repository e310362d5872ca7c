"""Models and data by their names on the Hugging Face hub: `owner/name`, or `owner/name@revision`.

The hub's own client downloads into its own cache (HF_HOME), keeps the files that are whole where it is interrupted, and
honours HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN. What is fetched is data only: configurations, tokenizers, safetensors.
Pickles, programs and second copies of the weights stay where they are.
"""

import functools
import glob
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from verl_omni.utils.model_index import INDEXES, read_index_file

NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w./-]+))?")
COMMIT = re.compile(r"[0-9a-f]{40}")
DATA = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
SMALL = (".json", ".txt", ".model", ".jinja")  # configurations, vocabularies, templates
# What diffusers and transformers look for by themselves; other files there are variants, or the same once more.
STEM = "(?:diffusion_pytorch_model|model|pytorch_lora_weights)"
WEIGHTS = re.compile(rf"{STEM}(?:-\d{{5}}-of-\d{{5}})?\.safetensors")
INDEX_OF_PARTS = re.compile(rf"{STEM}\.safetensors\.index\.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
WEIGHTS_SHOWN = "model.safetensors or diffusion_pytorch_model.safetensors, whole or in parts"
WORTH_A_BAR = 10**6  # bytes
ROWS = (".parquet", ".jsonl", ".txt")
RESERVE = 2**28  # bytes that a download leaves free


class HubError(OSError):
    """One line: what is not to be had from the hub, and what to do about it."""


class Repository(NamedTuple):
    name: str
    revision: str | None = None  # a branch, a tag, a commit; null: main
    kind: str = "model"

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name


def named(source: str | None, revision: str | None = None) -> Repository | None:
    """The repository that a setting names, where it names none of the folders here."""
    found = NAME.fullmatch(source or "")
    if found is None or os.path.exists(os.path.expanduser(source)):
        return None
    if revision and found[2] and revision != found[2]:
        raise ValueError(f"{source} and the revision {revision}: say one of the two")
    return Repository(found[1], found[2] or revision)


def model_folder(
    source: str, revision: str | None = None, *, weights: bool = True, setting: str = "actor_rollout_ref.model.path"
) -> str:
    """The folder of a model: the one that is named, or the copy of the hub's, which is downloaded where it is not here.

    Without `weights` only what is small, of which everything about a model can be known but its numbers.
    """
    repository = named(source, revision)
    if repository is None:
        return source
    with _in_one_line(repository, f'{setting}="{source}"'):
        return _model(_pinned(repository), weights)


def pinned(source: str, revision: str | None = None, setting: str = "actor_rollout_ref.model.path") -> str:
    """The commit that a name stands for now: what every process of a run takes, on this day and on another."""
    with _in_one_line(repository := named(source, revision), f'{setting}="{source}"'):
        return _pinned(repository).revision


def copied(folder: str | Path) -> Repository | None:
    """What a folder of the cache is a copy of."""
    folder = Path(folder).expanduser().absolute()
    kind, _, name = folder.parent.parent.name.partition("s--")
    if folder.parent.name != "snapshots" or kind != "model" or not COMMIT.fullmatch(folder.name):
        return None
    return Repository(name.replace("--", "/", 1), folder.name)


def fetch_weights(folder: str | Path) -> None:
    """Into a copy that has so far what is small."""
    if pin := copied(folder):
        with _in_one_line(pin, str(pin)):
            _model(pin, weights=True)


def shown_name(folder: str | Path) -> str:
    """What a person calls a model: its folder's name, or, of a copy of the hub's, the repository's."""
    pin = copied(folder)
    return pin.name.split("/")[1] if pin else Path(folder).expanduser().resolve().name


def file_of(source: str) -> Path:
    """`owner/name/path/of/file`, downloaded once."""
    owner, name, file = (source.split("/", 2) + ["", ""])[:3]
    if not (owner and name and file):
        raise FileNotFoundError("there is no such file")
    repository = Repository(f"{owner}/{name}")
    with _in_one_line(repository, source):
        return Path(_fetch(_pinned(repository), [file]), file)


def is_data(source: Any) -> bool:
    return isinstance(source, str) and source.startswith("hf://")


def pin_data(source: str, setting: str) -> str:
    """The same address with the commit that it stands for now."""
    repository, path = _data(source, setting)
    with _in_one_line(repository, f'{setting}="{source}"'):
        return f"hf://datasets/{_pinned(repository)}/{path}".rstrip("/")


def data_files(source: str, setting: str) -> list[Path]:
    """Files with rows of a data set: `hf://datasets/owner/name[@revision][/file, folder or pattern]`."""
    from huggingface_hub import errors

    repository, path = _data(source, setting)
    with _in_one_line(repository, f'{setting}="{source}"'):
        pin = _pinned(repository)
        there = _tree(pin)
        if there is None:
            raise errors.LocalEntryNotFoundError(pin.name)
        rows = [name for name in there if Path(name).suffix in ROWS and "/." not in f"/{name}"]
        chosen = [n for n in rows if not path or n == path or n.startswith(f"{path}/") or fnmatch(n, path)]
        if not chosen or (not path and len(chosen) > 1):
            known = ", ".join(dict.fromkeys(re.sub(r"-\d{5}-of-\d{5}", "-*", name) for name in rows))
            wrong = f"has no {path}" if path else f"has {len(rows)} files of prompts"
            raise HubError(
                f"the data set {wrong}: name a file, a folder or a pattern behind hf://datasets/{repository.name}/; "
                f"there: {known[:400] or 'nothing of ' + ', '.join(ROWS)}"
            )
        folder = _fetch(pin, chosen)
        return [Path(folder, name) for name in chosen]


def _data(source: str, setting: str) -> tuple[Repository, str]:
    found = DATA.fullmatch(source)
    if found is None:
        raise ValueError(
            f'{setting}="{source}": expected hf://datasets/OWNER/NAME/FILE, a folder or a pattern, such as '
            "hf://datasets/OWNER/NAME/data/train-*.parquet"
        )
    return Repository(found[1], found[2], "dataset"), (found[3] or "").rstrip("/")


def _model(pin: Repository, weights: bool) -> str:
    """Of a pipeline the folders that its index names; of any other model what lies at the top."""
    there, places = _tree(pin), {""}
    if there is None:  # offline, and fetched by others: whatever of it is here
        return _fetch(pin, None)
    named_in = [name for name in INDEXES if name in there][:1]
    if named_in:
        index = read_index_file(Path(_fetch(pin, named_in), *named_in))
        places = {name for name, kind in index.items() if isinstance(kind, list) and kind and kind[0]}
    files = [name for name in there if os.path.dirname(name) in places]
    numbers = [name for name in files if WEIGHTS.fullmatch(os.path.basename(name))]
    if weights:
        safe = {os.path.dirname(name) for name in numbers}
        for name in files:
            if name.endswith(PICKLES) and os.path.dirname(name) not in safe:
                raise HubError(
                    f"the weights {name} are a pickle, which can run code when it is read, and there is no safetensors "
                    "file beside it: choose another repository or revision, or convert it"
                )
        if not numbers:
            raise HubError(f"the repository holds no weights ({WEIGHTS_SHOWN})")
    small = [name for name in files if name.endswith(SMALL) and _is_small(os.path.basename(name))]
    return _fetch(pin, [*named_in, *small, *(numbers if weights else [])])


def _is_small(name: str) -> bool:
    """Not the index of parts that are left out."""
    return ".index." not in name or INDEX_OF_PARTS.fullmatch(name) is not None


def _pinned(repository: Repository) -> Repository:
    if COMMIT.fullmatch(repository.revision or ""):
        return repository
    return repository._replace(revision=_commit(repository))


@functools.cache  # one answer for all of a process
def _commit(repository: Repository) -> str:
    from huggingface_hub import HfApi, errors
    from huggingface_hub.utils import httpx  # the one that it has, which is httpx2 since 2.0

    name, how, silence = repository.name, {"repo_type": repository.kind, "revision": repository.revision}, None
    try:
        if not _offline():
            HfApi().repo_info(name, **how)
    except (httpx.ConnectError, httpx.TimeoutException) as error:
        silence = error
    try:
        commit = HfApi().resolve_revision(name, **how, local_files_only=bool(silence) or _offline()).resolved
    except errors.RevisionResolutionError as error:
        raise error from silence
    if silence:
        print(f"The hub cannot be reached: {repository} as it is in the cache, {commit[:8]}", file=sys.stderr)
    return commit


def _tree(pin: Repository) -> dict[str, int] | None:
    """Every file of a commit with its size; None where nobody here has asked for it before and nobody can be asked."""
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    how = {"repo_type": pin.kind, "revision": pin.revision}
    for asked in (False, True):
        try:
            return {file.path: file.size for file in get_cached_repo_tree(pin.name, **how)}
        except CachedRepoTreeNotFoundError:
            if asked or _offline():
                return None
            snapshot_download(pin.name, **how, allow_patterns=[], **_quiet())  # keeps the list
    return None


def _fetch(pin: Repository, files: list[str] | None) -> str:
    """The folder of a commit, with these files in it (all that is there: None). No network where they are."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    how = {"repo_type": pin.kind, "revision": pin.revision}
    if files is None:
        return snapshot_download(pin.name, **how, local_files_only=True)
    folder, sizes = _folder(pin) / "snapshots" / pin.revision, _tree(pin) or {}
    missing = [name for name in files if not (folder / name).is_file()]
    if not missing:
        return str(folder)
    if _offline():
        raise LocalEntryNotFoundError(missing[0])
    size = sum(sizes.get(name, 0) for name in missing)
    how["allow_patterns"] = [glob.escape(name) for name in missing]
    if size < WORTH_A_BAR:
        return snapshot_download(pin.name, **how, **_quiet())
    _check_space(size)
    said = f"{len(missing)} files, {size / 10**9:.2f} GB"
    print(f"Downloading {pin.name} at {pin.revision[:8]} ({said}) to {_cache()}", file=sys.stderr, flush=True)
    return snapshot_download(pin.name, **how)


def _quiet() -> dict[str, Any]:
    """No bars for what is over at once."""
    from tqdm import tqdm

    return {"tqdm_class": functools.partial(tqdm, disable=True)}


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser()


def _offline() -> bool:
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


def _folder(pin: Repository) -> Path:
    from huggingface_hub.file_download import repo_folder_name

    return _cache() / repo_folder_name(repo_id=pin.name, repo_type=pin.kind)


def _check_space(size: int) -> None:
    cache = _cache()
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if size + RESERVE > free:
        raise HubError(
            f"{size / 10**9:.2f} GB are to be downloaded to {cache}, where {free / 10**9:.2f} GB are free: make room, "
            "or set HF_HOME to a folder on a larger disk"
        )


@contextmanager
def _in_one_line(repository: Repository, where: str) -> Iterator[None]:
    """What the client raises, in the user's words."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    what = "data set" if repository.kind == "dataset" else "model"
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{where}: the {what} is gated: accept its terms on its page on the hub, and give a token of your account: "
            "HF_TOKEN=hf_... before the command, or `hf auth login` once"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f'{where}: {repository.name} has no revision "{repository.revision}" on the hub') from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"{where} is no folder here, and the hub shows no {what} of that name: check its spelling; one that is "
            "private needs a token, HF_TOKEN=hf_... before the command"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.RevisionResolutionError) as error:
        cause = " ".join(str(error.__cause__ or error).split())[:120]
        why = "HF_HUB_OFFLINE is set" if _offline() else f"the hub cannot be reached, or does not give it ({cause})"
        raise HubError(
            f"{where} is no folder here, and {repository.name} is not, or not wholly, in the cache {_cache()}: {why}; "
            f"download it where there is a network (hf download {repository.name}), or name a folder"
        ) from error
    except HubError as error:
        raise HubError(f"{where}: {error}") from error
    except (httpx.HTTPError, errors.HfHubHTTPError, errors.FileMetadataError) as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise HubError(
            f"{where}: the download of {repository.name} was interrupted ({said}); the same command fetches what is "
            "missing"
        ) from error
