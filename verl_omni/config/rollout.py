"""Knobs of the rollout: what is drawn, how the reverse process steps, and which engine does it."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from verl_omni.config.actor import PRECISIONS
from verl_omni.config.knob import (
    MOST_DENOISING,
    MOST_IMAGES,
    MOST_NODES,
    MOST_PROCESSES,
    MOST_SECONDS,
    MOST_SEED,
    MOST_SIDE,
    MOST_STEPS,
    MOST_TOKENS,
    MOST_TRIES,
    knob,
    names_in,
)

POLICY_GRADIENT = "algorithm.trainer_type=policy_gradient"
SERVERS = "actor_rollout_ref.hybrid_engine=false"
HTTP = "actor_rollout_ref.rollout.http.port"


@dataclass
class DiffusionPipelineConfig:
    """What one call of the generator does; the names are diffusers' own."""

    height: int = knob(
        512, "image height in pixels, a multiple of the model's vae_scale_factor * 2", least=1, most=MOST_SIDE
    )
    width: int = knob(512, "image width in pixels, likewise", least=1, most=MOST_SIDE)
    num_frames: int | None = knob(
        None, "frames of a video; null for image models", least=1, most=MOST_IMAGES, of_some_models=True
    )
    num_inference_steps: int = knob(10, "denoising steps of a training rollout", least=1, most=MOST_DENOISING)
    true_cfg_scale: float = knob(
        1.0, "true classifier-free guidance (Qwen-Image); 1 turns it off", least=1, of_some_models=True
    )
    guidance_scale: float | None = knob(
        None, "guidance of pipelines that call it so; null: theirs", least=0, of_some_models=True
    )
    guidance_scale_2: float | None = knob(
        None, "Wan2.2: guidance of the low-noise transformer; null: guidance_scale", least=0, of_some_models=True
    )
    audio_guidance_scale: float | None = knob(
        None,
        "guidance of the sound of a video with sound, 1: none, 0: it follows the negative prompt alone where the video "
        "is guided; null: guidance_scale",
        least=0,
        of_some_models=True,
    )
    frame_rate: float | None = knob(
        None, "frames a second of a video with sound; null: the pipeline's own", above=0, of_some_models=True
    )
    audio_duration_s: float | None = knob(
        None,
        "seconds of a sound, counted in thousandths; null: the model's own, 10 of LongCat-AudioDiT, 60 of ACE-Step",
        least=0.001,
        most=600,
        of_some_models=True,
    )
    negative_prompt: str | None = knob(
        None, "negative prompt where the data has no `negative_prompt` column; null: as the model's pipeline has it"
    )
    max_sequence_length: int | None = knob(
        None,
        "longest prompt in tokens; a longer one is an error; null: the limit of the model's pipeline",
        least=1,
        most=MOST_TOKENS,
    )


# A model's adapter says which of these it reads.
OF_SOME_MODELS = tuple(f.name for f in dataclasses.fields(DiffusionPipelineConfig) if f.metadata["of_some_models"])

# Validation may change any of these; what is left null is as in training.
ValPipelineConfig = dataclasses.make_dataclass(
    "ValPipelineConfig",
    [(f.name, f.type | None, knob(None, f"validation's {f.name}; null: as in training", **vars(f.metadata["range"])))
     for f in dataclasses.fields(DiffusionPipelineConfig)],
    namespace={"__module__": __name__},
)  # fmt: skip


@dataclass
class DiffusionRolloutAlgoConfig:
    """The stochastic reverse process. What is left null is the algorithm's own choice."""

    sde_type: str | None = knob(None, "reverse step: sde, cps, dance_sde, or a registered name")
    noise_level: float | None = knob(
        None, "noise level a (eta of dance_sde); 0 is the ODE, which only direct preference can train", least=0
    )
    sde_window_size: int | None = knob(
        None,
        "how many steps are stochastic and trained; null: all but the last",
        least=1,
        most=MOST_DENOISING,
        needs=POLICY_GRADIENT,
    )
    sde_window_range: list[int] | None = knob(
        None,
        "[lo, hi) within which a window lies; null: all but the last",
        least=0,
        most=MOST_DENOISING,
        needs=POLICY_GRADIENT,
    )
    sde_window_schedule: str | None = knob(
        None,
        "where the window starts: random (drawn anew), progressive, decay, exp_decay (it moves over training)",
        choices=names_in("verl_omni.pipelines.schedulers.windows", "SCHEDULES"),
        needs=POLICY_GRADIENT,
    )
    sde_window_iters: int | None = knob(
        None, "training steps between two moves of a moving window", least=1, most=MOST_STEPS, needs=POLICY_GRADIENT
    )
    sde_window_stride: int | None = knob(
        None, "denoising steps that a moving window moves by", least=1, most=MOST_DENOISING, needs=POLICY_GRADIENT
    )
    sde_window_per_group: bool | None = knob(
        None, "a random window is drawn for each prompt, not for each step", needs=POLICY_GRADIENT
    )
    audio_share: float | None = knob(
        None,
        "a video with sound: the sound's share of a step's log-probability and divergences; null: every latent number "
        "counts the same",
        least=0,
        most=1,
        needs=POLICY_GRADIENT,
    )
    same_initial_noise: bool | None = knob(None, "all images of a prompt start from the same noise")
    branches: int | None = knob(
        None,
        "so many images part from one state at one stochastic step, and are compared with each other alone; a prompt "
        "has n / branches such states; null: each image goes its own way",
        least=2,
        most=MOST_IMAGES,
        needs=POLICY_GRADIENT,
    )


@dataclass
class DiffusionValKwargs:
    """How validation samples: by default the ODE, one image a prompt, the same seeds every time."""

    pipeline: ValPipelineConfig = knob(ValPipelineConfig, "")
    n: int = knob(1, "images a prompt in validation", least=1, most=MOST_IMAGES)
    noise_level: float = knob(0.0, "noise level in validation; 0 is the deterministic sampler", least=0)
    sde_type: str | None = knob(
        None,
        "reverse step in validation; null: as in training",
        needs="actor_rollout_ref.rollout.val_kwargs.noise_level",
    )
    seed: int = knob(42, "seed of the validation images", least=0, most=MOST_SEED)


@dataclass
class PoolConfig:
    """Rank cheaply, train exactly: a prompt's images are the best and the worst of a pool drawn in few steps or bits.
    """

    size: int | None = knob(
        None,
        "images a prompt that are drawn first, in few steps of the ODE or in 8 bits, and scored; the n that score best "
        "and worst are drawn again from the same noise and trained; null: no pool",
        least=2,
        most=MOST_IMAGES,
        needs="algorithm.sample_source=online",
    )
    num_inference_steps: int | None = knob(
        None,
        "denoising steps of the pool's images; null: the rollout's own, with precision=fp8",
        least=1,
        most=MOST_DENOISING,
        needs="actor_rollout_ref.rollout.pool.size",
    )
    precision: str | None = knob(
        None,
        "fp8: the pool is drawn with the linear layers of the transformer's blocks in 8 bits, what is chosen of it is "
        "not; null: as what is chosen",
        choices=PRECISIONS,
        needs="actor_rollout_ref.rollout.pool.size",
    )


@dataclass
class AgentConfig:
    num_workers: int = knob(
        1,
        "processes that turn prompts into requests and wait for images and rewards",
        least=1,
        most=MOST_PROCESSES,
        may_change=True,
    )
    default_agent_loop: str = knob("diffusion_single_turn_agent", "agent loop for rows without an `agent_name`")


@dataclass
class CheckpointEngineConfig:
    """How weights get from the training processes to rollout servers."""

    backend: str | None = knob(
        None, "null: through Ray's object store; gloo, nccl or another of verl's checkpoint engines", needs=SERVERS
    )
    update_weights_bucket_megabytes: int = knob(
        256,
        "weights that are sent at a time",
        least=1,
        most=10**6,
        needs="actor_rollout_ref.rollout.checkpoint_engine.backend",
    )
    engine_kwargs: dict[str, Any] = knob(
        {}, "further arguments of that engine", needs="actor_rollout_ref.rollout.checkpoint_engine.backend"
    )


@dataclass
class HttpConfig:
    """Images for people who look at the policy while it trains, and ask for them over HTTP."""

    port: int | None = knob(
        None,
        "rollout server i answers OpenAI's image requests on port + i; 0: each on a free port; null: none answers",
        least=0,
        most=65535,
        needs=SERVERS,
    )
    host: str = knob("127.0.0.1", "where they listen; beyond this machine only with token_file", needs=HTTP)
    token_file: str | None = knob(None, "file with the token that must be sent to them; null: none", needs=HTTP)
    max_pixels: int | None = knob(
        None,
        "most pixels of an image; null: those of the run's own images, training's or validation's",
        least=1,
        most=MOST_SIDE**2,
        needs=HTTP,
    )
    max_images: int = knob(
        4, "most images of a request; never more than max_num_seqs", least=1, most=MOST_IMAGES, needs=HTTP
    )
    max_connections: int = knob(128, "most open connections of a server", least=1, most=MOST_TRIES, needs=HTTP)
    max_connections_per_address: int = knob(64, "most of them from one machine", least=1, most=MOST_TRIES, needs=HTTP)


@dataclass
class DiffusionRolloutConfig:
    name: str = knob(
        "diffusers",
        "rollout engine: diffusers (on the actor's own weights, or in servers), vllm_omni (a copy, or in servers), or "
        "one of your own",
        choices=names_in("verl_omni.workers.rollout", "engines"),
    )
    n_gpus_per_node: int | None = knob(
        None,
        "hybrid_engine=false: rollout servers on each node, a device each (on a CPU: processes); null: 1",
        least=1,
        most=MOST_PROCESSES,
        may_change=True,
    )
    nnodes: int | None = knob(
        None, "hybrid_engine=false: nodes with rollout servers; null: 1", least=1, most=MOST_NODES, may_change=True
    )
    tensor_model_parallel_size: int = knob(
        1,
        "devices of one rollout server",
        least=1,
        most=MOST_PROCESSES,
        waits="a rollout server draws with one device: start one for each (rollout.n_gpus_per_node), or share a model "
        "that fits none of them out with actor_rollout_ref.rollout.gather=blocks in the training workers",
    )
    gather: str = knob(
        "whole",
        "how ranks that share a model draw with it in the training workers: whole (each gathers all of it) or blocks "
        "(one block at a time, in step with the others: slower, for a model that does not fit beside its shares)",
        choices=("whole", "blocks"),
        needs="actor_rollout_ref.hybrid_engine=true",
        may_change=True,
    )
    share_samples: bool = knob(
        False,
        "ranks that share the tokens of each sample in training (ulysses_sequence_parallel_size) draw it together "
        "too, for samples whose forward one device cannot hold; false: each draws whole samples of its own",
        needs="actor_rollout_ref.hybrid_engine=true",
        may_change=True,
    )
    server_restarts: int = knob(
        3,
        "how often each rollout server that has died is started again",
        least=0,
        most=MOST_TRIES,
        needs=SERVERS,
        may_change=True,
    )
    checkpoint_engine: CheckpointEngineConfig = knob(CheckpointEngineConfig, "", may_change=True)
    http: HttpConfig = knob(HttpConfig, "", may_change=True)
    n: int = knob(16, "images a prompt: the group that is compared", least=1, most=MOST_IMAGES)
    seed: int = knob(0, "seed of the training rollouts", least=0, most=MOST_SEED)
    max_num_seqs: int = knob(32, "requests in one forward", least=1, most=MOST_IMAGES, may_change=True)
    request_batch_max_wait_ms: float = knob(
        20.0, "how long a batch that is not full waits for more requests", least=0, most=MOST_SECONDS, may_change=True
    )
    cfg_in_one_forward: bool = knob(
        True,
        "under CFG, both halves of a step in one forward (of twice max_num_seqs rows), where their shapes agree",
        may_change=True,
    )
    compile_vae: bool | None = knob(
        None, "compile the VAE's decoder; null: that of an image VAE, on a GPU, without vae_tiling", may_change=True
    )
    vae_tiling: bool = knob(
        False,
        "decode in tiles, whose seams are blended: less memory from 1024 pixels on, and with videos",
        may_change=True,
    )
    precision: str | None = knob(
        None,
        "fp8: training's images are drawn with the linear layers of the transformer's blocks in 8 bits (on a CPU "
        "emulated), and old log-probabilities are of the training graph; null: as training computes",
        choices=PRECISIONS,
        needs="algorithm.sample_source=online",
    )
    encoder_offload: bool | None = knob(
        None,
        "text encoders in CPU memory: true: when idle; false: never; null: once a rollout had no new prompt",
        may_change=True,
    )
    pipeline: DiffusionPipelineConfig = knob(DiffusionPipelineConfig, "")
    algo: DiffusionRolloutAlgoConfig = knob(DiffusionRolloutAlgoConfig, "")
    pool: PoolConfig = knob(PoolConfig, "")
    val_kwargs: DiffusionValKwargs = knob(DiffusionValKwargs, "", may_change=True)
    agent: AgentConfig = knob(AgentConfig, "")
    engine_kwargs: dict[str, Any] = knob({}, "further arguments of the rollout engine", may_change=True)


def validation_pipeline(rollout: DiffusionRolloutConfig) -> DiffusionPipelineConfig:
    """The pipeline knobs of validation: training's, with those of `val_kwargs.pipeline` that are set."""
    over = {k: v for k, v in dataclasses.asdict(rollout.val_kwargs.pipeline).items() if v is not None}
    return dataclasses.replace(rollout.pipeline, **over)
