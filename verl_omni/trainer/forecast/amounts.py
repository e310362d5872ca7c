"""How much one training step is: images, forwards, pairs, of the whole run and of one rank."""

import math
from dataclasses import dataclass
from pathlib import Path

from verl_omni.algorithms.forward_process import follows_old_policy
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.drawing import equal_parts
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.schedulers.windows import sde_window
from verl_omni.workers.engine.frozen import own_config
from verl_omni.workers.engine.teachers import teacher_folders
from verl_omni.workers.layout import Layout
from verl_omni.workers.losses import build_loss_function

DECODED_AT_ONCE = 16  # `decode_batch_size` of the rollout


@dataclass(frozen=True)
class Amounts:
    images: int  # of a step
    drawn: int  # by one call of the rollout: those, or the pool that they are chosen from
    steps: int  # of a rollout
    trained: int  # steps (or noise levels) of a sample
    stored: int  # steps of a sample that are kept
    guided: bool  # two halves of CFG
    reuses: bool  # the rollout's unconditional half, where there is one
    updates: int  # optimizer steps, of all epochs
    mini_images: int  # of one optimizer step
    draws: bool
    reference: bool
    copies: int  # of the trained weights: old policy, moving average, frozen policies that are swapped in
    chained: int = 1  # forwards that one pair's gradient goes through
    models: int = 0  # beside the trained one: frozen policies that are modules of their own
    keeps_means: bool = False  # those that drew
    validates: bool = False
    teachers: int = 0  # on devices of their own

    @property
    def keeps_uncond(self) -> bool:
        """Of the rollout, for the first optimizer step."""
        return self.guided and self.stored > 0 and self.reuses

    def decoded_at_once(self, max_num_seqs: int) -> int:
        return min(equal_parts(max_num_seqs, DECODED_AT_ONCE), self.drawn)

    def pairs(self, layout: Layout) -> int:
        """That a rank trains on in one optimizer step."""
        return math.ceil(self.mini_images * self.trained / layout.data)


def amounts(settings: DiffusionTrainerConfig) -> Amounts:
    arr, algorithm = settings.actor_rollout_ref, settings.algorithm
    adapter = DiffusionModelBase.get_class(arr.model)
    loss = build_loss_function(arr.actor)
    steps, draws = adapter.num_steps(arr.model), algorithm.sample_source == "online"
    chained = loss.loss_fn.chained_steps(arr.actor)
    if algorithm.trainer_type == "policy_gradient":
        stored = len(sde_window(arr.rollout.algo, steps, 0, 0, group=0))
        trained = max(1, math.ceil(stored * algorithm.timestep_fraction - 1e-9))
    else:
        stored, levels = 0, steps - chained + 1
        trained = algorithm.timesteps_per_sample or max(1, math.ceil(levels * algorithm.timestep_fraction - 1e-9))
    group = arr.rollout.n if draws else 2
    models, swapped_in = _frozen(settings)
    trainer, asked = settings.trainer, settings.data.val_files is not None
    return Amounts(
        images=settings.data.train_batch_size * group,
        drawn=settings.data.train_batch_size * max(group, arr.rollout.pool.size or 0),
        steps=steps,
        trained=trained,
        stored=stored,
        guided=adapter.cfg_scale(arr.model) > 1,
        reuses=arr.actor.reuse_uncond and not loss.compares_in_full(arr.rollout.precision, arr.ref.precision),
        updates=settings.data.train_batch_size // arr.actor.ppo_mini_batch_size * arr.actor.ppo_epochs,
        mini_images=arr.actor.ppo_mini_batch_size * group,
        draws=draws,
        reference=loss.needs_reference,
        copies=int(follows_old_policy(arr.model.algorithm, arr.actor)) + bool(arr.actor.ema_decay) + swapped_in,
        chained=chained,
        models=models,
        validates=asked and bool(trainer.val_before_train or trainer.test_freq or trainer.val_only),
        keeps_means=stored > 0 and loss.keeps_means(arr.ref.precision),
        teachers=len(teacher_folders(arr.actor.teacher.path)) if arr.actor.teacher.ranks else 0,
    )


def _frozen(settings: DiffusionTrainerConfig) -> tuple[int, int]:
    """Of the folders that a reference and teachers are read from where training is: modules of their own, and what is
    swapped in."""
    arr = settings.actor_rollout_ref
    folders = [] if arr.actor.teacher.ranks else list(teacher_folders(arr.actor.teacher.path).values())
    if arr.ref.path is not None and not arr.ref.param_offload:
        folders.append(arr.ref.path)
    models = sum(own_config(Path(folder).expanduser(), arr.model) is not None for folder in folders)
    return models, len(folders) - models
