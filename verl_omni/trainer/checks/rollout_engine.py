"""What a rollout engine cannot do, said before it is started."""

import inspect

from verl_omni.config import DiffusionRolloutConfig
from verl_omni.config.knob import typed
from verl_omni.config.rollout import HTTP
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.utils.listening import is_loopback
from verl_omni.workers.rollout import engine_class
from verl_omni.workers.rollout.image_request import http_token

ARR = "actor_rollout_ref"
# Settings of `rollout` that an engine reads only if it says so (`reads`); null is its own choice.
OF_SOME_ENGINES = ("compile_vae", "encoder_offload")


def check_checkpoint_engine(settings: DiffusionTrainerConfig) -> None:
    """The way of weights to rollout servers is known, and there are devices for it."""
    rollout = settings.actor_rollout_ref.rollout
    name = rollout.checkpoint_engine.backend
    if name is None:
        return
    shown = f"{ARR}.rollout.checkpoint_engine.backend={name}"
    if name not in ("gloo", "ipc") and settings.trainer.device == "cpu":
        raise ValueError(f"{shown} needs GPUs: choose gloo, or leave it out")
    if name == "ipc" and settings.trainer.device == "cuda":
        raise ValueError(
            f"{shown} is for processes on one GPU, and the servers of a run have GPUs of their own: choose gloo or nccl"
        )
    servers = (rollout.n_gpus_per_node or 1) * (rollout.nnodes or 1)
    if name == "ipc" and servers > (ranks := settings.trainer.n_gpus_per_node * settings.trainer.nnodes):
        raise ValueError(f"{shown}: of {servers} rollout servers {ranks} have a training process each: choose gloo")
    if rollout.server_restarts != DiffusionRolloutConfig().server_restarts:
        raise ValueError(
            f"{ARR}.rollout.server_restarts={rollout.server_restarts} has no effect with {shown}: a server that is "
            "started again finds its weights in Ray's object store only. Leave one of them out"
        )
    from verl_omni.workers.transfer.channel import backend

    try:
        engine = backend(rollout.checkpoint_engine)
    except ValueError as error:  # verl names those that there are, and what others lack
        raise ValueError(f"{shown}: {error}") from error
    if name == "naive" or engine.wire_format != "named_tensors":
        raise ValueError(f"{shown} brings no whole weights to servers: choose gloo or nccl, or leave it out")
    try:
        inspect.signature(engine).bind(bucket_size=0, **rollout.checkpoint_engine.engine_kwargs)
    except TypeError as error:
        raise ValueError(f"{ARR}.rollout.checkpoint_engine.engine_kwargs: {error} ({shown})") from error


def check_http(settings: DiffusionTrainerConfig) -> None:
    """There is a port for every server, and who comes from elsewhere has to know a token."""
    rollout, http = settings.actor_rollout_ref.rollout, settings.actor_rollout_ref.rollout.http
    if http.port is None:
        return
    last = http.port + (rollout.n_gpus_per_node or 1) * (rollout.nnodes or 1) - 1
    if http.port and last > 65535:
        raise ValueError(f"{HTTP}={http.port}: the last rollout server would listen on {last}; ports end at 65535")
    if (rollout.nnodes or 1) > 1 and is_loopback(http.host):
        raise ValueError(
            f"{HTTP}={http.port}: of {rollout.nnodes} nodes, nobody reaches the servers of the others at {http.host}: "
            f"set {ARR}.rollout.http.host=0.0.0.0 and a token_file"
        )
    if DiffusionModelBase.get_class(settings.actor_rollout_ref.model).needs_images:
        raise ValueError(
            f"{HTTP}={http.port}: {settings.actor_rollout_ref.model.architecture} draws from images, which OpenAI's "
            "image request has not; leave it out"
        )
    http_token(http)


def check_gather(settings: DiffusionTrainerConfig) -> None:
    """Drawing block by block is for ranks that share a model, and for engines that can."""
    from verl_omni.workers.engine.registry import engine_class as training_engine  # which imports verl
    from verl_omni.workers.engine.registry import layout_of

    arr = settings.actor_rollout_ref
    if arr.rollout.gather != "blocks":
        return
    shown, whole = f"{ARR}.rollout.gather=blocks", f"leave it out, or set {ARR}.rollout.gather=whole"
    if not engine_class(arr.rollout.name).draws_by_blocks:
        raise ValueError(f"{shown}: {_why_not(arr.rollout.name, 'draws_by_blocks')}; {whole}")
    if not training_engine(arr.actor.strategy).draws_by_blocks:
        raise ValueError(f"{shown}: {ARR}.actor.strategy={arr.actor.strategy} draws with the whole model; {whole}")
    layout = layout_of(settings)
    if not layout.is_spread:
        raise ValueError(f"{shown} has no effect with one device, which holds the whole model anyway: leave it out")
    if layout.parts == 1:
        raise ValueError(
            f"{shown} has no effect where each of {layout.world} ranks holds the whole weights (fsdp_size=1): leave it "
            "out"
        )
    if arr.actor.engine.fold_lora:
        raise ValueError(f"{shown}: {ARR}.actor.engine.fold_lora=true folds into the whole weights; leave one out")
    for name, precision in (("precision", arr.rollout.precision), ("pool.precision", arr.rollout.pool.precision)):
        if precision is not None:
            raise ValueError(f"{shown}: {ARR}.rollout.{name}={precision} needs the whole weights in 8 bits; {whole}")


def check_share_samples(settings: DiffusionTrainerConfig) -> None:
    """Drawing together is for ranks that train together, and for engines that can."""
    from verl_omni.workers.engine.registry import engine_class as training_engine
    from verl_omni.workers.engine.registry import layout_of

    arr, shown = settings.actor_rollout_ref, f"{ARR}.rollout.share_samples=true"
    if not arr.rollout.share_samples:
        return
    if not engine_class(arr.rollout.name).draws_together:
        raise ValueError(f"{shown}: {_why_not(arr.rollout.name, 'draws_together')}; leave it out")
    if not training_engine(arr.actor.strategy).draws_together:
        raise ValueError(f"{shown}: with {ARR}.actor.strategy={arr.actor.strategy} each rank draws alone; leave it out")
    if layout_of(settings).sequence == 1:
        raise ValueError(
            f"{shown} has no effect where no ranks share samples: set "
            f"{ARR}.actor.fsdp_config.ulysses_sequence_parallel_size, or leave it out"
        )
    if arr.rollout.gather == "blocks":
        raise ValueError(f"{shown} does not go with {ARR}.rollout.gather=blocks: leave one of them out")


def check_reward_input(settings: DiffusionTrainerConfig) -> None:
    """There are latents for rewards that are to have them."""
    arr = settings.actor_rollout_ref
    if settings.reward.input != "latents":
        return
    engine = engine_class(arr.rollout.name)
    if not engine.gives_latents:
        raise ValueError(
            f"reward.input=latents: the rollout engine {arr.rollout.name} does not say that it gives them "
            "(`gives_latents`); leave it out, or choose diffusers"
        )
    if (made := engine.makes(arr.model)) == "text":
        raise ValueError(f"reward.input=latents: the model makes {made}, which has none; leave it out")


def check_rollout_engine(settings: DiffusionTrainerConfig) -> None:
    """It can draw this, and reads what is set for it."""
    arr = settings.actor_rollout_ref
    if settings.algorithm.sample_source != "online":
        return
    engine = engine_class(arr.rollout.name)
    engine.check(settings)
    for name in OF_SOME_ENGINES:
        if (value := getattr(arr.rollout, name)) is not None and name not in engine.reads:
            raise ValueError(
                f"{ARR}.rollout.{name}={typed(value)} does nothing with {ARR}.rollout.name={arr.rollout.name}, which "
                "does not read it: leave it out"
            )


def _why_not(name: str, can: str) -> str:
    """Why an engine beside training cannot draw as it is asked to."""
    why = "draws with a copy of its own" if engine_class(name).has_a_copy else f"does not say that it can (`{can}`)"
    return f"{ARR}.rollout.name={name} {why}"
