"""The transformer blocks, and how they are compiled."""

import functools
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from verl_omni.utils.call_signature import argument_names, by_name
from verl_omni.utils.user_cache import user_cache
from verl_omni.workers.engine.compile.adapters_together import adapters_together
from verl_omni.workers.engine.compile.clock import clock
from verl_omni.workers.engine.compile.in_eight_bits import in_eight_bits


def repeated_blocks(part: torch.nn.Module) -> list[torch.nn.Module]:
    """The transformer blocks: what diffusers itself names as the unit of compiling and of placement, spread or not."""
    names = set(getattr(part, "_repeated_blocks", None) or getattr(part, "_no_split_modules", None) or [])
    return [m for m in part.modules() if names & {cls.__name__ for cls in type(m).__mro__}]  # FSDP makes it a subclass


def compile_blocks(parts: dict[str, torch.nn.Module], backend: str = "inductor", budget: float = 1.0) -> None:
    """Compile each repeated block. Kernels are cached on disk, so that the next start finds them.

    `budget`: the share of what they would keep between forward and backward that they may keep.

    Gradient or none, adapters on or off, and each kind of block are graphs of their own: dynamo's default limit of 8
    would silently go back to eager. Here the limit is higher, and going over it is an error.
    """
    import torch._dynamo as dynamo

    choose_cache()
    clock.count()
    dynamo.config.recompile_limit = 64
    dynamo.config.accumulated_recompile_limit = 1024
    dynamo.config.fail_on_recompile_limit_hit = True
    if backend == "inductor":
        threading.Thread(target=start_compilers, daemon=True).start()
    for part in parts.values():
        blocks = repeated_blocks(part)
        for block in blocks:
            block.forward = compiled_by_mode(block, backend, budget)
        enter_like_the_others(blocks[0])


def choose_cache() -> None:
    """Where kernels are kept, unless the user says: not in /tmp, which is inductor's own choice and does not last.

    What is found there runs, so it has to be a folder that nobody else writes to. Where there can be none, it is /tmp
    after all.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) != default_cache_dir():  # torch sets its own too
        return
    cache = user_cache("inductor")
    try:
        cache.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (cache.parent, cache):
            folder.mkdir(mode=0o700, exist_ok=True)
            made = folder.stat()
            if made.st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to another user, and what is found there runs")
            folder.chmod(made.st_mode & 0o755)
        if not os.access(cache, os.W_OK):
            raise PermissionError(f"{cache} cannot be written")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    except OSError as error:
        why = f"{cache} cannot be written" if error.errno else error
        line = f"Compiled kernels are not kept for the next run: {why}. TORCHINDUCTOR_CACHE_DIR names another folder."
        print(line, file=sys.stderr, flush=True)


def start_compilers() -> None:
    """What inductor does once takes seconds: it can happen while the rest of the model is loaded."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import torch_key

    AsyncCompile.warm_pool()
    torch_key()


def compiled_by_mode(block: torch.nn.Module, backend: str, budget: float = 1.0) -> Callable:
    """The block's forward, compiled apart with a gradient, without one, and in 8 bits.

    Where dynamo sees a second size it goes on with graphs for any size, which are slower. It remembers sizes by
    function: rollouts of 24 rows and updates on 48 are to be two functions, each with one size.
    """
    forward = type(block).forward
    options = inductor_options(budget) if backend == "inductor" else {}
    compiled = {
        mode: torch.compile(types.MethodType(renamed(forward, mode), block), backend=backend, options=options.get(mode))
        for mode in ("with_gradient", "without_gradient", "in_fp8")
    }

    def call(*args: Any, **kwargs: Any) -> Any:
        without = "in_fp8" if getattr(block, "in_fp8", False) else "without_gradient"
        return compiled["with_gradient" if torch.is_grad_enabled() else without](*args, **kwargs)

    return call


def inductor_options(budget: float) -> dict[str, dict[str, Any]]:
    """By mode, where inductor does something else than by itself."""
    options: dict[str, dict[str, Any]] = {
        "in_fp8": {"post_grad_custom_pre_pass": in_eight_bits()},
        "with_gradient": {"joint_custom_post_pass": adapters_together()},
    }
    if budget < 1:
        from verl_omni.workers.engine.compile.memory_budget import within_budget

        options["with_gradient"]["custom_partitioner_fn"] = within_budget(budget)
    return options


@functools.cache
def renamed(function: types.FunctionType, suffix: str) -> types.FunctionType:
    """A copy that dynamo takes for another function."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{suffix}")
    copy = types.FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def enter_like_the_others(block: torch.nn.Module) -> None:
    """Give the first block its inputs as the blocks before give them to all others, so that one graph serves all.

    SD3's patch embedding hands over (B, L, C) as a transposed view, a layout that every residual sum after it would
    keep, and under LoRA what it hands over needs no gradient, where the inputs of later blocks do. Any view, such as a
    linear layer's output, takes its own graph for any size, as dynamo looks at the sizes of what it is a view of.
    """
    forward, passed_on = block.forward, streams(block)

    def alike(name: str, value: Any) -> Any:
        if name not in passed_on or not isinstance(value, torch.Tensor):
            return value
        value = value.clone(memory_format=torch.contiguous_format)
        lacks_gradient = torch.is_grad_enabled() and not value.requires_grad
        return value.detach().requires_grad_() if lacks_gradient else value

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(**{name: alike(name, value) for name, value in by_name(block, args, kwargs).items()})

    block.forward = call


def streams(block: torch.nn.Module) -> set[str]:
    """The inputs that a block hands on to the next one."""
    joint = getattr(block.attn, "add_q_proj", None) is not None if hasattr(block, "attn") else False
    return {argument_names(block)[0], "encoder_hidden_states"} if joint else {argument_names(block)[0]}
