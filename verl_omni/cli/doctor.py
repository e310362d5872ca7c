"""Look at this machine: what a run would find here, what is missing, and what to type then."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from verl_omni.cli.tables import aligned
from verl_omni.utils.options import Parser

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

OK, NOTE, BAD = "ok", "-", "!!"  # it is there; it is not, which some runs do without; no run works without
PYTHONS = ((3, 10), (3, 13))
# distribution -> what it is for, and how to get it
OPTIONAL = {
    "rapidocr": ("the rewards ocr and ocr_line", "pip install 'verl-omni[rewards]'"),
    "av": ("files of videos with sound", "pip install 'verl-omni[video]'"),
    "vllm-omni": ("rollout with vLLM-Omni", "in an environment of its own: pip install 'verl-omni[vllm-omni]'"),
    "veomni": ("training with VeOmni", "in an environment of its own: pip install 'verl-omni[veomni]'"),
    "tensorboard": ("trainer.logger=[tensorboard]", "pip install tensorboard"),
    "wandb": ("trainer.logger=[wandb]", "pip install wandb"),
    "mlflow": ("trainer.logger=[mlflow]", "pip install mlflow"),
    "trackio": ("trainer.logger=[trackio]", "pip install trackio"),
}
BOUNDED_BY_VERL = {"transformers"}  # from above; the tests pass there too, as docs/versions.md says
LEAST_DISK, LEAST_SHM = 20, 2  # GiB


class Finding(NamedTuple):
    mark: str
    what: str
    found: str
    remedy: str = ""


def main() -> None:
    parser = Parser("verl-omni doctor", description=__doc__)
    parser.parse_args()
    findings = [*software(), *accelerators(), *machine(), *settings()]
    print(aligned([(f.mark, f.what, f.found + (f"  ->  {f.remedy}" if f.remedy else "")) for f in findings]))
    bad = [finding.what for finding in findings if finding.mark == BAD]
    print(f"\nNo run works here before these are mended: {', '.join(bad)}" if bad else "\nA run can start here.")
    sys.exit(int(bool(bad)))


def software() -> Iterator[Finding]:
    version = sys.version_info[:2]
    fits = PYTHONS[0] <= version < PYTHONS[1]
    remedy = "" if fits else "use Python 3.10, 3.11 or 3.12"
    yield Finding(OK if fits else BAD, "Python", f"{platform.python_version()} at {sys.executable}", remedy)
    yield from requirements()
    for name, (use, remedy) in OPTIONAL.items():
        found = installed(name)
        yield Finding(OK if found else NOTE, name, found or f"not here; for {use}", "" if found else remedy)


def requirements() -> Iterator[Finding]:
    """What pyproject.toml asks for, where it is not so, and the libraries that a person asks about first."""
    from packaging.requirements import Requirement

    import verl_omni

    yield Finding(OK, "verl-omni", f"{verl_omni.__version__} at {Path(verl_omni.__file__).parent}")
    try:
        needed = [Requirement(text) for text in metadata.requires("verl-omni") or ()]
    except metadata.PackageNotFoundError:
        yield Finding(BAD, "verl-omni", "is not installed, only found", "pip install -e . in its folder")
        return
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = installed(requirement.name)
        fits = found is not None and requirement.specifier.contains(found, prereleases=True)
        if not fits and found and requirement.name in BOUNDED_BY_VERL and from_below(requirement).contains(found):
            yield Finding(NOTE, requirement.name, f"{found}, above what verl asks for ({requirement.specifier})")
            continue
        if not fits or requirement.name in ("verl", "torch", "diffusers", "transformers", "ray"):
            remedy = "" if fits else f"pip install '{requirement.name}{requirement.specifier}'"
            yield Finding(OK if fits else BAD, requirement.name, found or "not here", remedy)


def from_below(requirement: "Requirement") -> "SpecifierSet":
    """What it asks for, without upper bounds."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(
        ",".join(str(s) for s in requirement.specifier if not s.operator.startswith("<")), prereleases=True
    )


def accelerators() -> Iterator[Finding]:
    import torch

    from verl_omni.report.starts import output_of

    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    seen = torch.cuda.is_available()
    if driver and not seen:
        remedy = "install a torch that is built for this driver" if torch.version.cuda is None else "is it hidden?"
        yield Finding(BAD, "GPU", f"driver {driver.splitlines()[0]}, but torch {torch.__version__} sees none", remedy)
        return
    if not seen:
        yield Finding(NOTE, "GPU", "none: runs are on the CPU, which is for tiny models")
        return
    version = driver.splitlines()[0] if driver else "unknown"
    yield Finding(OK, "driver", f"{version}; torch is built for CUDA {torch.version.cuda}")
    for i in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(i)
        busy = "" if free > 0.9 * total else "somebody else uses it"
        about = f"{torch.cuda.get_device_name(i)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
        yield Finding(OK if not busy else NOTE, f"GPU {i}", about, busy)


def machine() -> Iterator[Finding]:
    import psutil

    memory = psutil.virtual_memory()
    yield Finding(OK, "CPU", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} cores for this process")
    yield Finding(OK, "memory", f"{memory.available / 2**30:.0f} of {memory.total / 2**30:.0f} GiB free")
    shm = Path("/dev/shm")
    places = {"here": (Path.cwd(), LEAST_DISK), "hub cache": (hub_cache(), LEAST_DISK)}
    if shm.is_dir():
        places["/dev/shm"] = (shm, LEAST_SHM)
    for name, (path, least) in places.items():
        there = next(folder for folder in (path, *path.parents) if folder.is_dir())
        free = shutil.disk_usage(there).free / 2**30
        remedy = ""
        if free < least:
            remedy = "give it more (docker: --shm-size)" if path == shm else "checkpoints and models may not fit"
        yield Finding(NOTE if remedy else OK, f"disk, {name}", f"{free:.0f} GiB free in {path}", remedy)
        if not os.access(there, os.W_OK):
            yield Finding(BAD if name == "here" else NOTE, f"disk, {name}", f"{there} cannot be written to")


def settings() -> Iterator[Finding]:
    """Variables of the environment that change what a run does."""
    for name in ("CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_ENDPOINT", "RAY_ADDRESS", "OMP_NUM_THREADS"):
        if name in os.environ:
            yield Finding(OK, name, os.environ[name] or "(empty)")


def hub_cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
