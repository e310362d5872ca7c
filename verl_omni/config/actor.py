"""Knobs of the update: loss, optimizer, sharding and checkpoints of the trained transformer."""

from dataclasses import dataclass
from typing import Any

from verl_omni.config.knob import (
    MOST_NODES,
    MOST_PROCESSES,
    MOST_PROMPTS,
    MOST_SEED,
    MOST_STEPS,
    MOST_TRIES,
    UNSAID,
    knob,
    moved,
    names_in,
)

# Instead of a number: the run finds it by a trial.
AUTO = "auto"
# In which passes without a gradient may be computed, other than in `engine.dtype`.
PRECISIONS = ("fp8",)
ENGINE = "actor_rollout_ref.actor.engine"
VEOMNI = "actor_rollout_ref.actor.strategy=veomni"

DTYPES = ("float32", "bfloat16")
# A loss would have to be scaled, and the scale be found anew whenever it overflows.
NOT_DTYPES = {"float16": "small gradients become 0 in its range; bfloat16 is as fast and has float32's"}
TEACHER = "actor_rollout_ref.actor.teacher.path"
TEACHER_POOL = "actor_rollout_ref.actor.teacher.n_gpus_per_node"
CONTENTS = ("model", "optimizer", "extra", "export")
# torch.optim's, but for those that need a closure (LBFGS), sparse gradients (SparseAdam) or matrices only (Muon), or
# have no weight decay (Rprop)
OPTIMIZERS = (
    "AdamW", "Adam", "Adafactor", "Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD",
)  # fmt: skip


def attention_backends() -> list[str]:
    from diffusers.models.attention_dispatch import AttentionBackendName

    return [*(backend.value for backend in AttentionBackendName), "flash_4"]


@dataclass
class DiffusionLossConfig:
    """What is left null is the algorithm's own choice."""

    loss_mode: str | None = knob("flow_grpo", "name of a registered loss or algorithm")
    clip_ratio: float | None = knob(None, "PPO clip range epsilon: the ratio is kept within 1 -/+ epsilon", above=0)
    clip_ratio_low: float | None = knob(None, "lower clip range; null: clip_ratio", least=0)
    clip_ratio_high: float | None = knob(None, "upper clip range; null: clip_ratio", least=0)
    adv_clip_max: float | None = knob(None, "advantages are clamped to -/+ this", above=0)
    extra: dict[str, Any] = knob({}, "knobs of one algorithm only; its file says which")


@dataclass
class OptimizerConfig:
    optimizer: str = knob("AdamW", "class in torch.optim", choices=OPTIMIZERS)
    lr: float = knob(1e-4, "learning rate", above=0, may_change=True)
    betas: list[float] = knob([0.9, 0.999], "betas of Adam and its relatives", least=0, below=1)
    eps: float = knob(1e-8, "epsilon of Adam and its relatives", above=0)
    weight_decay: float = knob(1e-4, "weight decay", least=0)
    fused: bool | None = knob(
        None, "the optimizer's step in one kernel; null: on a GPU, where torch has one", may_change=True
    )
    clip_grad: float = knob(1.0, "largest gradient norm; 0 turns clipping off", least=0)
    lr_scheduler_type: str = knob(
        "constant",
        "how the learning rate goes on after the warm-up",
        choices=("constant", "linear", "cosine"),
        may_change=True,
    )
    lr_warmup_steps: int = knob(0, "optimizer steps of linear warm-up", least=0, most=MOST_STEPS, may_change=True)
    total_training_steps: int | None = knob(
        None, "optimizer steps of the schedule; null: those of the run", least=1, most=MOST_STEPS, may_change=True
    )


@dataclass
class EngineConfig:
    """What every training engine reads, and rollout servers with it: `actor.engine`."""

    dtype: str | None = knob(
        None,
        "dtype of forward and backward; null: bfloat16 on a GPU, float32 on a CPU",
        choices=DTYPES,
        refused=NOT_DTYPES,
    )
    model_dtype: str | None = knob(
        None,
        "dtype that weights are held in; null: float32, but `dtype` for the frozen weights under LoRA",
        choices=DTYPES,
        refused=NOT_DTYPES,
    )
    use_torch_compile: bool | None = knob(
        None, "compile the transformer blocks; null: on a GPU, unless ranks share samples", may_change=True
    )
    compile_ahead: bool | None = knob(
        None,
        "compile the update in other processes while the first rollout runs, of several ranks by one on each machine; "
        "null: on a GPU with one rank",
        may_change=True,
    )
    activation_memory_budget: float = knob(
        1.0,
        "share of what compiled blocks would keep between forward and backward that they may keep, about: the rest is "
        "computed again, what costs least arithmetic for its bytes first, attention never (torch's setting)",
        above=0,
        most=1,
        may_change=True,
    )
    fold_lora: bool | None = knob(
        None,
        "fold LoRA into a second copy of its weights for the rollout, or into those that ranks gather for it; null: on "
        "a GPU that has room for it, with one rank",
        may_change=True,
    )
    fused_gelu: bool | None = knob(
        None,
        "in compiled blocks without a gradient, the activation inside the matrix product; null: on a GPU",
        may_change=True,
    )
    fp8_modules: Any | None = knob(
        None,
        "linear layers of the transformer's blocks that precision=fp8 computes in 8 bits, by the ends of their names; "
        "null: the architecture's default",
    )
    attention_backend: str | None = knob(
        None,
        "diffusers attention backend, such as _native_cudnn, or flash_4 (FlashAttention 4, a package of its own); "
        "null: on a GPU the model's own, or what a trial at the start finds right and fastest; else diffusers'",
        choices=attention_backends,
        may_change=True,
    )
    param_offload: bool = knob(False, "keep weights in CPU memory between stages", may_change=True)
    optimizer_offload: bool = knob(
        False,
        "keep optimizer state in CPU memory; a step has a piece of it on the device at a time",
        may_change=True,
    )
    sample_offload: bool = knob(
        False,
        "keep drawn samples, and what other policies say of them, in CPU memory; a micro-batch at a time goes to the "
        "device",
        may_change=True,
    )
    seed: int = knob(0, "seed of what the engine initialises (LoRA weights)", least=0, most=MOST_SEED)

    @classmethod
    def within(cls, own: Any) -> "EngineConfig":
        """What an engine's own settings say of these, where nobody else does."""
        said = {name: getattr(own, name, UNSAID) for name in cls.__dataclass_fields__}
        return cls(**{name: value for name, value in said.items() if value != UNSAID})


@dataclass
class MovedToEngine:
    """Settings of an engine that every engine reads: they stand in `actor.engine`, and go on working here."""

    dtype: Any = moved(f"{ENGINE}.dtype")
    model_dtype: Any = moved(f"{ENGINE}.model_dtype")
    use_torch_compile: Any = moved(f"{ENGINE}.use_torch_compile")
    compile_ahead: Any = moved(f"{ENGINE}.compile_ahead")
    fold_lora: Any = moved(f"{ENGINE}.fold_lora")
    fused_gelu: Any = moved(f"{ENGINE}.fused_gelu")
    attention_backend: Any = moved(f"{ENGINE}.attention_backend")
    param_offload: Any = moved(f"{ENGINE}.param_offload")
    optimizer_offload: Any = moved(f"{ENGINE}.optimizer_offload")
    seed: Any = moved(f"{ENGINE}.seed")


@dataclass
class FSDPConfig(MovedToEngine):
    """FSDP2's own: gloo on CPUs, NCCL on GPUs."""

    fsdp_size: int = knob(
        -1, "ranks in one shard group; -1: all", least=1, most=MOST_NODES, also=(-1,), may_change=True
    )
    ulysses_sequence_parallel_size: int = knob(
        1,
        "ranks that share the tokens of each sample, for long videos and large images",
        least=1,
        most=MOST_NODES,
        may_change=True,
    )
    reshard_after_forward: bool = knob(True, "free gathered weights after each block", may_change=True)


@dataclass
class VeOmniConfig(MovedToEngine):
    """VeOmni's own, as verl calls them."""

    fsdp_size: int = knob(
        -1, "ranks in one shard group; -1: all", least=1, most=MOST_NODES, also=(-1,), needs=VEOMNI, may_change=True
    )
    ulysses_parallel_size: int = knob(
        1,
        "ranks that share the tokens of each sample, for long videos and large images",
        least=1,
        most=MOST_NODES,
        needs=VEOMNI,
        may_change=True,
    )
    enable_full_shard: bool = knob(True, "free gathered weights after each block", needs=VEOMNI, may_change=True)
    strategy: Any = moved("actor_rollout_ref.actor.strategy")


@dataclass
class CheckpointConfig:
    save_contents: list[str] = knob(
        list(CONTENTS), "what a checkpoint holds; export: weights in diffusers' format", choices=CONTENTS
    )
    load_contents: list[str] = knob(["model", "optimizer", "extra"], "what resuming reads", choices=CONTENTS[:3])
    async_save: bool = knob(
        False, "copy what is saved to CPU memory and train on while it is written; it counts when all of it is there"
    )


@dataclass
class TeacherConfig:
    """A frozen policy of the same family to learn from, on the student's own states."""

    path: Any | None = knob(
        None,
        "folder of the teacher: LoRA weights for LoRA training, else a model or an export; {data_source: folder} for "
        "several",
    )
    coef: float | None = knob(
        None,
        "beside a policy-gradient loss other than opd: weight of the divergence from the teacher; null: 1",
        least=0,
        needs=TEACHER,
    )
    n_gpus_per_node: int | None = knob(
        None,
        "whole models only: devices on each node that hold the teachers and nothing else (on a CPU: processes); null: "
        "the training workers hold them",
        least=1,
        most=MOST_PROCESSES,
        needs=TEACHER,
        may_change=True,
    )
    nnodes: int | None = knob(
        None, "nodes with such devices; null: 1", least=1, most=MOST_NODES, needs=TEACHER_POOL, may_change=True
    )

    @property
    def ranks(self) -> int:
        """Processes that hold teachers and nothing else."""
        return (self.n_gpus_per_node or 0) * (self.nnodes or 1)


@dataclass
class DiffusionActorConfig:
    strategy: str = knob(
        "fsdp2",
        "training engine",
        choices=names_in("verl_omni.workers.engine.registry", "strategies"),
        may_change=True,
    )
    ppo_mini_batch_size: int = knob(
        4, "prompts (each with its n images) in one optimizer step", least=1, most=MOST_PROMPTS
    )
    ppo_micro_batch_size_per_gpu: int | str = knob(
        16,
        "(sample, step) pairs in one forward and backward: a memory knob only; auto: the fastest that a trial at the "
        "start finds room for, with blocks that are not compiled; checkpoints keep it",
        least=1,
        most=MOST_PROMPTS,
        also=(AUTO,),
        may_change=True,
    )
    ppo_epochs: int = knob(1, "passes over one rollout", least=1, most=MOST_TRIES)
    shuffle: bool = knob(False, "shuffle prompts between mini-batches")
    use_kl_loss: bool = knob(False, "add a KL term to the reference model")
    kl_loss_coef: float = knob(0.04, "weight of the KL term", least=0, needs="actor_rollout_ref.actor.use_kl_loss=true")
    old_log_probs: str | None = knob(
        None,
        "old log-probabilities of the rollout, of train (its own graph) or of a pass before the update (recompute); "
        "null: of rollout or train, whichever is exact",
        choices=names_in("verl_omni.workers.old_log_probs", "SOURCES"),
        needs="algorithm.trainer_type=policy_gradient",
    )
    first_ratio_tolerance: float | None = knob(
        1e-3,
        "how far a ratio of training to rollout may be from 1 before the first update (where their kernels round "
        "differently, as in bfloat16: 100 times that, on average); further is an error; null: not checked",
        least=0,
        may_change=True,
    )
    reuse_uncond: bool = knob(
        True, "under CFG, the first optimizer step takes the rollout's own unconditional half", may_change=True
    )
    ema_decay: float = knob(
        0.0, "decay of a moving average of the trained weights: it is validated and exported; 0: none", least=0, below=1
    )
    teacher: TeacherConfig = knob(TeacherConfig, "")
    diffusion_loss: DiffusionLossConfig = knob(DiffusionLossConfig, "")
    optim: OptimizerConfig = knob(OptimizerConfig, "")
    engine: EngineConfig = knob(EngineConfig, "")
    fsdp_config: FSDPConfig = knob(FSDPConfig, "")
    veomni_config: VeOmniConfig = knob(VeOmniConfig, "")
    checkpoint: CheckpointConfig = knob(CheckpointConfig, "", may_change=True)


@dataclass
class RefVeOmniConfig:
    """The reference is computed by the actor's engine."""

    strategy: Any = moved("actor_rollout_ref.actor.strategy")


@dataclass
class DiffusionRefConfig:
    path: str | None = knob(
        None,
        "folder of a reference of your own: LoRA weights for LoRA training, or a model or an export; null: the model "
        "that training began with (with LoRA: the one without it)",
    )
    log_prob_micro_batch_size_per_gpu: int | None = knob(
        None, "pairs in one no-grad forward; null: the actor's", least=1, most=MOST_PROMPTS, may_change=True
    )
    param_offload: bool = knob(
        False,
        "full fine-tuning, or a reference of your own: keep it in CPU memory when it is not used",
        may_change=True,
    )
    precision: str | None = knob(
        None,
        "fp8: the reference's means in 8 bits, compared with those that drew, which had 8 bits too; null: as training",
        choices=PRECISIONS,
        needs="actor_rollout_ref.rollout.precision=fp8",
        may_change=True,
    )
    veomni_config: RefVeOmniConfig = knob(RefVeOmniConfig, "")
