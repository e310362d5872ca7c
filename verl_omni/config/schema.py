"""The whole configuration as one tree of dataclasses. The YAML files in trainer/config only choose among them."""

import functools
from dataclasses import dataclass, field
from typing import Any

from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionModelConfig,
    DiffusionRefConfig,
    DiffusionRolloutConfig,
)
from verl_omni.config.algorithm import DiffusionAlgoConfig
from verl_omni.config.knob import (
    MOST_IMAGES,
    MOST_NODES,
    MOST_PROCESSES,
    MOST_PROMPTS,
    MOST_SECONDS,
    MOST_SEED,
    MOST_STEPS,
    MOST_TRIES,
    knob,
    names_in,
)
from verl_omni.config.rewriter import RewriterConfig

SERVED = "reward.reward_model.enable=true"


@dataclass
class DataConfig:
    train_files: Any = knob(
        None,
        "parquet, JSONL or text file(s) of training prompts, a folder of images with captions, or files of a data set "
        "on the Hugging Face hub, such as hf://datasets/OWNER/NAME/data/train-*.parquet",
    )
    val_files: Any = knob(None, "file(s) of validation prompts; null: no validation", may_change=True)
    prompt_key: str = knob("prompt", "the column with the prompt")
    train_batch_size: int = knob(8, "prompts a training step", least=1, most=MOST_PROMPTS)
    val_batch_size: int | None = knob(
        None, "prompts at once in validation; null: all", least=1, most=MOST_PROMPTS, may_change=True
    )
    val_max_samples: int = knob(
        -1, "validate on the first so many prompts; -1: all", least=1, most=MOST_PROMPTS, also=(-1,), may_change=True
    )
    shuffle: bool = knob(True, "shuffle the training prompts every epoch")
    seed: int = knob(0, "seed of the shuffling", least=0, most=MOST_SEED)


def _model_config() -> DiffusionModelConfig:
    """Training replays with the rollout's own settings: they are written once, there."""
    return DiffusionModelConfig(
        pipeline="${actor_rollout_ref.rollout.pipeline}", algo="${actor_rollout_ref.rollout.algo}"
    )


@dataclass
class ActorRolloutRefConfig:
    model: DiffusionModelConfig = field(default_factory=_model_config)
    actor: DiffusionActorConfig = knob(DiffusionActorConfig, "")
    rollout: DiffusionRolloutConfig = knob(DiffusionRolloutConfig, "")
    ref: DiffusionRefConfig = knob(DiffusionRefConfig, "")
    rewriter: RewriterConfig = knob(RewriterConfig, "")
    hybrid_engine: bool = knob(
        True,
        "the rollout engine sits in the training workers; false: rollout servers with copies of the model",
        may_change=True,
    )


@dataclass
class RewardFunctionConfig:
    path: str | None = knob(None, "your Python file; null: the reward of the row's data_source")
    name: str = knob(
        "compute_score", "the function in it, sync or async, for one image or (argument `images`) for many"
    )
    reward_kwargs: dict[str, Any] = knob({}, "further arguments of the function")


@dataclass
class ModuleConfig:
    path: str | None = knob(
        None,
        "Python file of your own reward manager; reward.reward_manager.name is its class",
        needs="reward.reward_manager.source=importlib",
    )


@dataclass
class RewardManagerConfig:
    source: str = knob(
        "register", "register (by name) or importlib (from module.path)", choices=("register", "importlib")
    )
    name: str = knob("image", "registered reward manager")
    module: ModuleConfig = knob(ModuleConfig, "")


@dataclass
class RewardModelConfig:
    enable: bool = knob(False, "start a server of a vision-language model, which rewards of vlm_judge then ask")
    enable_resource_pool: bool = knob(False, "on GPUs of its own, as beside a training on GPUs", needs=SERVED)
    n_gpus_per_node: int = knob(
        0, "GPUs of each server", least=0, most=MOST_PROCESSES, needs="reward.reward_model.enable_resource_pool=true"
    )
    nnodes: int = knob(1, "servers; they share the work", least=1, most=MOST_NODES, needs=SERVED)
    model_path: str | None = knob(None, "the model's folder, or its name on the hub", needs=SERVED)
    command: str = knob(
        "vllm serve {model} --host {host} --port {port} --tensor-parallel-size {gpus}",
        "starts a server of OpenAI's chat completions with a page /health",
        needs=SERVED,
    )
    start_timeout: float = knob(
        900.0, "seconds until it answers; it loads the model first", above=0, most=MOST_SECONDS, needs=SERVED
    )


@dataclass
class PairwiseConfig:
    """Win rate in the group: a training image's reward is the share of comparisons with others that it wins. Or what a
    function says that sees the whole group."""

    by: str | None = knob(
        None,
        "score (the image with the better score wins) or pair (the reward is shown two images, and says how far the "
        "first is the better one, 0 to 1), or group (your function is given all images of a prompt in one call, and "
        "scores each of them); null: rewards are scores",
        choices=("score", "pair", "group"),
        needs="algorithm.sample_source=online",
    )
    opponents: int | None = knob(
        None,
        "other images of its prompt that each is compared with, drawn at random; null: all",
        least=1,
        most=MOST_IMAGES,
        needs="reward.pairwise.by",
    )


@dataclass
class ValidationFunctionConfig(RewardFunctionConfig):
    path: str | None = knob(
        None, "your Python file; null: reward.validation.scorers, or the rewards of training", needs="data.val_files"
    )


@dataclass
class ValidationRewardConfig:
    """What scores validation images, where it is not what training learns from."""

    scorers: Any = knob(
        None,
        "the rewards of validation images alone, as in reward.scorers; null: those of training",
        needs="data.val_files",
    )
    custom_reward_function: ValidationFunctionConfig = knob(ValidationFunctionConfig, "")


@dataclass
class RewardConfig:
    num_workers: int = knob(1, "processes that compute rewards", least=1, most=MOST_PROCESSES, may_change=True)
    batch_size: int = knob(
        8, "images in one call of a function that takes `images`", least=1, most=MOST_IMAGES, may_change=True
    )
    timeout: float = knob(
        600.0,
        "seconds that one call of a reward may take, and the import of your file; after that it has failed",
        above=0,
        most=MOST_SECONDS,
        may_change=True,
    )
    retries: int = knob(2, "times that a reward is asked again for an image after it failed", least=0, most=MOST_TRIES)
    on_failure: str = knob(
        "drop",
        "what happens to an image whose reward failed for good: drop (it leaves its group, the others are learned "
        "from; counted in reward/failed) or stop (the run ends)",
        choices=("drop", "stop"),
    )
    max_failures: int = knob(
        3, "prompts in a row whose reward fails end the run, with its own message", least=1, most=MOST_TRIES
    )
    scorers: Any = knob(
        None,
        "the rewards to add up, [{name: ocr, weight: 1}, {name: pickscore, weight: 0.3}], or settings of those that "
        "data_source names, such as reward.scorers.ocr.num_threads=2",
    )
    input: str = knob(
        "decoded",
        "what rewards are given of a sample: decoded (an image, a video, a sound) or latents (`latent`, `latents`: "
        "training samples are then not decoded at all, and only validation has pictures)",
        choices=("decoded", "latents"),
    )
    pairwise: PairwiseConfig = knob(PairwiseConfig, "")
    validation: ValidationRewardConfig = knob(ValidationRewardConfig, "", may_change=True)
    custom_reward_function: RewardFunctionConfig = knob(RewardFunctionConfig, "")
    reward_manager: RewardManagerConfig = knob(RewardManagerConfig, "")
    reward_model: RewardModelConfig = knob(RewardModelConfig, "")


@dataclass
class TrainerConfig:
    project_name: str = knob("verl-omni", "project in the trackers", may_change=True)
    experiment_name: str = knob("default", "run in the trackers, and the folder's name", may_change=True)
    default_local_dir: str = knob(
        "outputs/${trainer.project_name}/${trainer.experiment_name}",
        "folder of the run: metrics, images, checkpoints",
        may_change=True,
    )
    logger: list[str] = knob(
        ["console", "jsonl"],
        "any of console, jsonl, tensorboard, wandb, ...",
        choices=names_in("verl_omni.report.tracking", "known_backends"),
        may_change=True,
    )
    callbacks: list[str] = knob(
        [], "classes that are called as the run goes on: module.Class or file.py:Class", may_change=True
    )
    mode: str = knob(
        "colocated",
        "colocated (rollout in the training workers; with hybrid_engine=false: separate), separate (rollout servers, "
        "in turn with training), one_step_off (servers draw the samples of the next step while this one is learned), "
        "fully_async (servers draw on and on, training takes what has been scored)",
        choices=names_in("verl_omni.trainer.diffusion.modes", "PACES"),
        may_change=True,
    )
    max_staleness: int | None = knob(
        None,
        "training steps that samples may be behind; 0 draws in turn; null: 1 (one_step_off), 2 (fully_async)",
        least=0,
        most=MOST_TRIES,
        needs="trainer.mode=one_step_off or fully_async",
        may_change=True,
    )
    stale_groups: str = knob(
        "drop",
        "what is further behind when it would be trained: drop (and draw it anew) or keep",
        choices=("drop", "keep"),
        needs="trainer.mode=fully_async",
        may_change=True,
    )
    replay: str | None = knob(
        None,
        "folder of a fully_async run: train on what it was trained on, drawn by weights of the same versions",
        needs="trainer.mode=fully_async",
        may_change=True,
    )
    total_epochs: int = knob(1, "passes over the training prompts", least=1, most=MOST_STEPS, may_change=True)
    total_training_steps: int | None = knob(
        None, "training steps; null: total_epochs", least=1, most=MOST_STEPS, may_change=True
    )
    val_before_train: bool = knob(True, "validate before the first step", may_change=True)
    val_only: bool = knob(False, "validate and stop", may_change=True)
    test_freq: int = knob(
        -1, "steps between validations; -1: only at the end; 0: never", least=-1, most=MOST_STEPS, may_change=True
    )
    save_freq: int = knob(
        -1, "steps between checkpoints; -1: only at the end; 0: never", least=-1, most=MOST_STEPS, may_change=True
    )
    save_minutes: float = knob(
        15.0,
        "minutes after which a step is saved too; the next checkpoint replaces it; 0: never",
        least=0,
        most=MOST_SECONDS,
        may_change=True,
    )
    max_ckpt_to_keep: int | None = knob(
        None, "older checkpoints are deleted; null: keep all", least=1, most=MOST_STEPS, may_change=True
    )
    keep_best: bool = knob(
        False,
        "save every step whose validation scores better than all before, and keep it until a better one is saved",
        needs="trainer.save_freq",
        may_change=True,
    )
    resume_mode: str = knob(
        "auto",
        "auto (go on from the folder's latest checkpoint), auto_previous (where that is damaged, from the one before), "
        "disable (start from nothing; what is in the folder moves to earlier_N), or resume_path",
        choices=("auto", "auto_previous", "disable", "resume_path"),
    )
    resume_from_path: str | None = knob(
        None, "checkpoint folder for resume_mode=resume_path", needs="trainer.resume_mode=resume_path"
    )
    resume_changes: str = knob(
        "refuse",
        "refuse or allow to go on from a checkpoint of a run with another algorithm, model, data, reward, ...",
        choices=("refuse", "allow"),
    )
    log_val_images: int = knob(
        64, "validation images written to disk each time; -1: all", least=-1, most=MOST_PROMPTS, may_change=True
    )
    log_train_groups: int = knob(
        8,
        "prompts of a training step whose best and worst image are kept, at the first step and at those that are "
        "validated; 0: none",
        least=0,
        most=MOST_PROMPTS,
    )
    nnodes: int = knob(1, "machines", least=1, most=MOST_NODES, may_change=True)
    n_gpus_per_node: int = knob(
        1, "devices on each (on a CPU: worker processes)", least=1, most=MOST_PROCESSES, may_change=True
    )
    device: str | None = knob(
        None, "cpu or cuda; null: a GPU if there is one", choices=("cpu", "cuda"), may_change=True
    )
    seed: int = knob(0, "seed of what the trainer draws", least=0, most=MOST_SEED)
    profile_step: int | None = knob(
        None,
        "write a torch profile of this step (1 is the first) to the run's folder",
        least=1,
        most=MOST_STEPS,
        may_change=True,
    )


@dataclass
class RolloutPoolConfig:
    """Short names of the settings of rollout servers."""

    n_gpus_per_node: int | None = knob(
        None, "the same as actor_rollout_ref.rollout.n_gpus_per_node", least=1, most=MOST_PROCESSES
    )
    nnodes: int | None = knob(None, "the same as actor_rollout_ref.rollout.nnodes", least=1, most=MOST_NODES)


@dataclass
class RayConfig:
    num_cpus: int | None = knob(None, "CPUs that Ray may count on; null: all", least=1, most=MOST_NODES)
    address: str | None = knob(None, "a running Ray cluster; null: start one here")
    env_vars: list[str] = knob(
        [], "environment variables to take along to the machines of that cluster, by name", needs="ray.address"
    )
    placement_timeout: float = knob(
        300.0, "seconds to wait for CPUs and GPUs that Ray has, while others hold them", above=0, most=MOST_SECONDS
    )
    timeline_json_file: str | None = knob(None, "write Ray's timeline here")


@dataclass
class DiffusionTrainerConfig:
    data: DataConfig = knob(DataConfig, "")
    actor_rollout_ref: ActorRolloutRefConfig = knob(ActorRolloutRefConfig, "")
    algorithm: DiffusionAlgoConfig = knob(DiffusionAlgoConfig, "")
    reward: RewardConfig = knob(RewardConfig, "")
    trainer: TrainerConfig = knob(TrainerConfig, "")
    rollout: RolloutPoolConfig = knob(RolloutPoolConfig, "", may_change=True)
    ray: RayConfig = knob(RayConfig, "", may_change=True)
    recipe: str | None = knob(None, "free text: what this run is", may_change=True)


@functools.cache  # once is enough, and takes 30 ms
def register() -> None:
    """Make the schema known to Hydra, under the name that diffusion_trainer.yaml starts from."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="diffusion_trainer_schema", node=DiffusionTrainerConfig)
