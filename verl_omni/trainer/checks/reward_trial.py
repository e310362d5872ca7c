"""The user's reward function asked once, before Ray and the model start: a mistake in it is known in seconds.

It is asked in a process of its own, which leaves nothing behind: no GPU memory in the driver, no state in the module.
Where it takes pictures it is asked first of all, before torch and verl are imported, which take longer than all checks.
"""

import asyncio
import json
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_omni.rewards.reward_function import SERVICES, RewardError, RewardFunction, told_of
from verl_omni.utils.errors import RunError
from verl_omni.utils.responses import GIVEN, GIVEN_MANY, KINDS, PICTURE

SIDE = 512  # of an image whose size the model will choose
RATE = 16_000
TRIED = {
    "image": "a grey image",
    "video": "a grey image",
    "sound": "a second of silence",
    "video with sound": "a grey and silent video",
    "text": "an empty text",
}
LONGEST = 10.0  # seconds to wait; a reward that loads a model takes its time in the run
# What no picture can be to blame for.
MISTAKES = ("AttributeError", "ImportError", "ModuleNotFoundError", "NameError", "TypeError", "UnboundLocalError")


def try_reward(
    config: DictConfig, row: dict[str, Any], kind: str = "image", function: RewardFunction | None = None
) -> str | None:
    """Ask for the score of grey images, of silence or of an empty text.

    Raises where that shows a mistake in the function, and returns what else fails: a reward may well refuse a grey
    image that scores drawn ones, so that is only told of.
    """
    custom = config.reward.custom_reward_function
    if function is None and custom.path:
        function = RewardFunction.of(custom, config.reward.timeout)
    if function is None or set(function.wanted) & set(SERVICES):
        return None
    function.check_takes(KINDS[kind])
    if kind == "latents":  # what shape they have is known when the model is there
        return None
    return _judged(elsewhere(lambda: _failure(config, row, kind, function)), kind)


def _judged(failure: dict[str, Any] | None, kind: str) -> str | None:
    if failure is None or "forked subprocess" in failure["said"]:  # CUDA cannot be used there: it was not asked
        return None
    said = f"{failure['said']} (asked for {TRIED[kind]}, before the run starts)"
    finite = not re.search(r"returned -?(nan|inf)", failure["said"])
    if failure["kind"] in MISTAKES or (failure["kind"] is None and finite):
        raise RunError(said)
    return f"{said}; if it fails for drawn images too, the run will end"


def try_first(config: DictConfig) -> bool:
    """The same with the first row and settings that nobody has checked yet; whether that was possible.

    The user's code is imported in the other process only: what it starts would not survive the forks of this one.
    """
    answer = elsewhere(lambda: _first_answer(config)) or {}
    if answer.get("mistake"):
        raise RunError(answer["mistake"])
    if answer.get("asked") and (told := _judged(answer["failure"], "image")):
        print(f"warning: {told}", flush=True)
    return answer.get("asked", False)


def try_gradient(config: DictConfig, function: RewardFunction, row: dict[str, Any]) -> None:
    """Refuse a differentiable function whose scores of noise, dark, grey or bright, do not move with the pixels.

    It is told the prompt of `row`.

    What fails otherwise, or takes long, is left to the run: a worker asks each reward for its gradient.
    """
    pipeline = config.actor_rollout_ref.model.pipeline
    found = elsewhere(lambda: _without_gradient(function, row, pipeline.height, pipeline.width))
    if found is not None:
        raise ValueError(
            f"reward function {function.name} has no gradient, which actor_rollout_ref.model.algorithm=draft follows: "
            f"{found['why']}; take .detach(), torch.no_grad, .item(), rounding and numpy out of it"
        )


def _without_gradient(function: RewardFunction, row: dict[str, Any], height: int, width: int) -> dict[str, str] | None:
    import torch

    from verl_omni.rewards.differentiable import told_by_name

    of_pixels = told_by_name(function.function.of_pixels, function.kwargs)
    noise = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    for low, high in ((0.0, 1.0), (0.0, 0.2), (0.4, 0.6), (0.8, 1.0)):  # a score may well be flat in some places
        pixels = (low + (high - low) * noise).requires_grad_()
        try:
            score = of_pixels(pixels, [told_of(row)])
            if not isinstance(score, torch.Tensor) or not score.requires_grad:
                return {"why": "its scores are constants to torch"}
            (gradient,) = torch.autograd.grad(score.sum(), pixels, allow_unused=True)
        except Exception as error:
            return {"why": str(error).split(". ")[0]} if "requires grad" in str(error) else None
        if gradient is not None and gradient.any():
            return None
    return {"why": "it is 0 for every pixel"}


def _first_answer(config: DictConfig) -> dict[str, Any]:
    from verl_omni.data.prompt_files import first_row
    from verl_omni.data.prompt_rows import as_sample

    files = OmegaConf.select(config, "data.train_files") or OmegaConf.select(config, "data.val_files")
    own = OmegaConf.select(config, "reward.custom_reward_function.path")
    libraries = OmegaConf.select(config, "actor_rollout_ref.model.external_lib")  # which may make anything
    if not own or not files or libraries or OmegaConf.select(config, "algorithm.sample_source") == "offline":
        return {}
    try:
        function = RewardFunction.of(config.reward.custom_reward_function, config.reward.timeout)
    except (OSError, ValueError) as error:
        return {"mistake": str(error)}
    pictures = {*PICTURE, *(f"{name}s" for name in PICTURE)}
    if not pictures >= {*function.wanted} & {*GIVEN, *GIVEN_MANY}:  # the model has to be asked what it makes
        return {}
    if set(function.wanted) & set(SERVICES):
        return {}
    try:
        row, columns = first_row(files, "data.train_files")
        sample = as_sample(row, columns, config.data.prompt_key)
    except (OSError, ValueError, KeyError, StopIteration, AttributeError):
        return {}  # the checks will say what is wrong with them
    return {"asked": True, "failure": _failure(config, sample, "image", function)}


def scored_kind(config: DictConfig) -> str:
    """What rewards are given of a sample."""
    return "latents" if config.reward.input == "latents" else made_kind(config)


def made_kind(config: DictConfig) -> str:
    """What the run's engine makes with its model."""
    from verl_omni.workers.rollout import engine_class

    arr = config.actor_rollout_ref
    return engine_class(arr.rollout.name).makes(OmegaConf.to_object(arr.model))


def unmade(config: DictConfig, row: dict[str, Any], kind: str, function: RewardFunction) -> dict[str, Any]:
    """What the function would be told of a sample of this prompt that no model has made: grey, silent or empty."""
    shown = nothing(config, kind, function)
    return shown | told_of(row) | {"other": next(iter(shown.values()))}


def nothing(config: DictConfig, kind: str, function: RewardFunction) -> dict[str, Any]:
    if not KINDS[kind].is_seen:
        return {"response": "" if kind == "text" else silence()}
    size = config.actor_rollout_ref.rollout.pipeline
    height, width = size.height or SIDE, size.width or SIDE
    frames = [size.num_frames] if (size.num_frames or 1) > 1 else []
    if kind == "video with sound":
        return {"response": grey_and_silent(frames or [2], height, width)}
    if kind == "video" and {"video", "videos", "frame_rate", "frame_rates"} & set(function.wanted):
        return {"response": grey_video(frames or [2], height, width)}
    if function.accepts_any or {"solution_image", "solution_images"} & set(function.wanted):
        return {"response": grey(*frames, 3, height, width)}
    from PIL import Image

    image = Image.new("RGB", (width, height), (128, 128, 128))
    return {"image": [image] * frames[0] if frames else image}


def grey(*shape: int) -> Any:
    import torch

    return torch.full(shape, 0.5)


def grey_video(frames: list[int], height: int, width: int) -> Any:
    from verl_omni.utils.responses import Video

    return Video(grey(*frames, 3, height, width), 24.0)


def grey_and_silent(frames: list[int], height: int, width: int) -> Any:
    from verl_omni.utils.responses import VideoWithSound

    return VideoWithSound(grey(*frames, 3, height, width), silence(), 24.0)


def silence() -> Any:
    import torch

    from verl_omni.utils.responses import Sound

    return Sound(torch.zeros(1, RATE), RATE)


def elsewhere(ask: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Its answer in a process of its own; None too where there was none in time."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):  # what it prints, the run will print
                os.dup2(nowhere, stream)
            if torch := sys.modules.get("torch"):
                torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
            os.write(writer, json.dumps(ask()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], LONGEST)
    told = os.read(reader, 65536) if ready else b""
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(told) if told else None


def _failure(config: DictConfig, row: dict[str, Any], kind: str, function: RewardFunction) -> dict[str, Any] | None:
    """{"kind": what it raised, "said": in one line}; None where it answered."""
    samples = [unmade(config, row, kind, function)] * (2 if function.batched else 1)
    try:
        asyncio.run(function.score(samples))
    except RewardError as error:
        cause = error.__cause__
        return {"kind": type(cause).__name__ if cause else None, "said": " ".join(str(error).split())[:2000]}
    return None
