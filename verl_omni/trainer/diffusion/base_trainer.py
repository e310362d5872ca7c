"""What all trainers share: one process that orders the work and holds nothing heavy.

`BaseRayDiffusionTrainer` starts workers, validates, checkpoints and logs; a subclass owns one training step.
"""

import contextlib
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch.utils.data import Dataset, Sampler
from verl.protocol import DataProto
from verl.single_controller.ray import RayWorkerGroup

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.algorithms.registry import get_algorithm
from verl_omni.data.prompt_loader import create_dataloader, create_val_dataloader, steps_for_epochs
from verl_omni.report.timeline import Timeline
from verl_omni.trainer.callbacks import Callback, Run, Step, UsersCallbacks
from verl_omni.trainer.diffusion import after_step, ending, processes, symptoms
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.modes import PACES, Pace
from verl_omni.trainer.diffusion.sampling import Sampling
from verl_omni.trainer.diffusion.zero_gradient import ZeroGradients
from verl_omni.trainer.placement import Placement
from verl_omni.trainer.progress import Stages, tell, timer
from verl_omni.trainer.run_folder.checkpoints import Checkpoints, WholeStep
from verl_omni.trainer.run_folder.opening import open_folder
from verl_omni.workers.engine.registry import layout_of
from verl_omni.workers.losses import build_loss_function


class BaseRayDiffusionTrainer(Sampling):
    """Workers, data, validation, checkpoints and logging, shared by all ways of training."""

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        role_worker_mapping: processes.WorkerClasses,
        resource_pool_manager: Placement,
        ray_worker_group_cls: type[RayWorkerGroup] = processes.Ranks,
        processor: Any = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        collate_fn: Any = None,
        train_sampler: Sampler | None = None,
        device_name: str | None = None,
    ):
        self.config, self.tokenizer, self.processor = OmegaConf.to_object(config), tokenizer, processor
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.checkpoints = Checkpoints(config, self.run_dir, self.give_up_checkpoint)
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.device_name = device_name or config.trainer.device
        self.algorithm = get_algorithm(config.actor_rollout_ref.model.algorithm)
        self.online = config.algorithm.sample_source == "online"
        self.loss_function = build_loss_function(self.config.actor_rollout_ref.actor)
        self.layout = layout_of(self.config)
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.timeline = Timeline()
        self._create_dataloaders(collate_fn, train_sampler)
        self.run = Run(config, self.run_dir, self.total_steps)
        self.callbacks = UsersCallbacks(list(config.trainer.callbacks))

    @property
    def global_step(self) -> int:
        """Training steps that the weights have seen."""
        return self.run.step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self.run.step = step

    def _create_dataloaders(self, collate_fn: Any, sampler: Sampler | None) -> None:
        data, trainer = self.config.data, self.config.trainer
        self.train_loader = self.val_loader = None
        self.total_steps = 0
        if self.train_dataset is not None:
            order = {"shuffle": data.shuffle, "seed": data.seed, "sampler": sampler}
            self.train_loader = create_dataloader(
                self.train_dataset, data.train_batch_size, collate_fn=collate_fn, **order
            )
            epoch = len(sampler if hasattr(sampler, "__len__") else self.train_dataset)
            self.total_steps = trainer.total_training_steps or steps_for_epochs(
                epoch, data.train_batch_size, trainer.total_epochs
            )
        if self.val_dataset is not None:
            self.val_loader = create_val_dataloader(self.val_dataset, data.val_batch_size)

    # ---- workers -------------------------------------------------------------------------------------

    def init_workers(self) -> None:
        """Start the workers that hold the model; for online sampling also the rewards and the agent loops."""
        tell(stage="loading of the model")
        config, pools, device = self.run.config, self.resource_pool_manager, self.device_name
        processes.set_schedule_length(config, self.total_steps)
        self.actor_wg = processes.start_workers(
            config, device, self.role_worker_mapping, pools, self.ray_worker_group_cls
        )
        self.teachers = processes.start_teachers(config, device, pools, self.ray_worker_group_cls, self.actor_wg)
        self.reward_loop_manager = self.agent_loop_manager = self.rollouts = None
        if self.online:
            drawing = processes.start_drawing(config, device, pools, self.actor_wg, self.layout, self.timeline)
            self.rollouts = drawing.rollouts
            self.reward_loop_manager, self.agent_loop_manager = drawing.rewards, drawing.agents
            processes.listen(config, self.rollouts)
        processes.load_models(self.actor_wg, self.rollouts, self.teachers)

    def shutdown(self) -> None:
        for manager in (self.agent_loop_manager, self.reward_loop_manager, self.rollouts):
            if manager is not None:
                manager.shutdown()

    # ---- the run -------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step: validate, save and log as the config says."""
        trainer = self.config.trainer
        self.run_dir.mkdir(parents=True, exist_ok=True)
        tell(stage="loading of the checkpoint", total=self.total_steps)
        start = self.checkpoints.load(self.actor_wg, self.total_steps, self.train_loader)
        self.global_step = start.step
        tracking = open_folder(self.run.config, self.run_dir, start, self.total_steps)
        before = trainer.val_only or start.validation_due or (trainer.val_before_train and start.source is None)
        try:
            self.callbacks.on_run_start(self.run)
            if self._validates and before:
                with timer({}, "testing"):
                    tracking.log(self._validate(), step=self.global_step)
            if not trainer.val_only:
                self._train(tracking)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, Exception) or not self.run.stopping:  # nobody asked: there is no Ray any more
                ending.save_what_is_whole(self.checkpoints, self.changes, self._save_after_failure, self._finish_saving)
                ending.report(self.run)
            ending.tell_callbacks(self.callbacks, self.run, error)
            raise
        tracking.finish()
        written = ending.report(self.run)
        self.callbacks.on_run_end(self.run, None)
        if not self.stopped:
            print(ending.where_things_are(self.run_dir, self.global_step, written), flush=True)

    @property
    def stopped(self) -> bool:
        """Asked to end before its last step."""
        return self.run.stopping and self.global_step < self.total_steps

    def _train(self, tracking: Any) -> None:
        if not self.config.actor_rollout_ref.hybrid_engine:
            self.timeline.write_to(self.run_dir, self.global_step or None)
        with contextlib.closing(self.new_pace()) as self.pace, contextlib.closing(after_step.Bar(self.run)) as bar:
            callbacks = self._after_step(tracking, bar)
            while self.global_step < self.total_steps and not self.run.stopping:
                after_step.follow(callbacks, self.run, self._next_step())
            if self.stopped and self.checkpoints.saving.misses(self.global_step):  # the signal came just after Save
                self.save_checkpoint()
            self._finish_saving()

    def new_pace(self) -> Pace:
        """When samples are drawn, by `trainer.mode`."""
        pace = PACES[self.config.trainer.mode]
        return pace(self, self.train_loader, self.run, self.checkpoints.trained_groups)

    def _after_step(self, tracking: Any, bar: Callback) -> list[Callback]:
        """What follows a training step, in this order."""
        return [
            after_step.Scores(self.config.reward.scorers),
            *([after_step.KeptSamples()] if self.online else []),
            *([after_step.Waiting(self.layout.world, self.num_servers)] if self.pace.overlaps else []),
            ZeroGradients(),
            *([after_step.Validation(self.checkpoints, self.pace.settle, self._validate)] if self._validates else []),
            symptoms.Symptoms(symptoms.updates_of(self.config)),
            after_step.Speed(self._devices),
            self.callbacks,
            after_step.Log(tracking, self.timeline),
            after_step.Save(self.checkpoints, self.save_checkpoint, self.see_to_checkpoint, tracking),
            bar,
        ]

    def _next_step(self) -> Step:
        """Samples of the next training step, and what is learned from them."""
        timing, number = Stages(), self.global_step + 1
        tell(stage="training", step=number)
        profiled = number == self.config.trainer.profile_step
        if profiled:
            self.actor_wg.start_profile()
        with timer(timing, "step"):
            batch, metrics = self.training_step(self.pace, timing)
        if profiled:
            self.actor_wg.stop_profile(str(self.run_dir))
        self.global_step = number
        self.checkpoints.whole = WholeStep(number, self.pace.data_state(), self.changes())
        return Step(number, metrics, batch, timing, last=number == self.total_steps)

    def training_step(self, pace: Pace, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """One step on the next experience: (the batch with its rewards, metrics)."""
        with timer(timing, "gen"):
            experience = pace.next()
        batch, metrics = self.learn(experience, timing)
        metrics |= pace.metrics(batch) | experience.metrics
        if self.online:
            metrics |= self.rollouts.metrics()
            self.release(experience, batch)
        return batch, metrics

    def learn(self, experience: Experience, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Rewards, advantages, update; it does not know which engine drew the samples."""
        raise NotImplementedError

    # ---- validation and checkpoints ------------------------------------------------------------------

    @property
    def _validates(self) -> bool:
        return self.val_loader is not None and self.online

    def _validate(self) -> dict[str, float]:
        metrics = self.validate()
        self.callbacks.on_validation(self.run, metrics)
        return metrics

    def save_checkpoint(self, last: bool = False) -> None:
        self._tell_of(self.checkpoints.save(self.actor_wg, last))

    def see_to_checkpoint(self) -> None:
        """One that is written while training goes on may be whole by now."""
        self._tell_of(self.checkpoints.advance(self.actor_wg))

    def _finish_saving(self) -> None:
        self._tell_of(self.checkpoints.finish(self.actor_wg))

    def _tell_of(self, checkpoints: list[Path]) -> None:
        for path in checkpoints:
            self.callbacks.on_checkpoint(self.run, path)

    def _save_after_failure(self) -> None:
        self.end_drawing()
        self.save_checkpoint()
        self._finish_saving()  # nothing comes after it

    def end_drawing(self) -> None:
        """Ranks that draw may have other weights in their place: until all have the trained ones again."""
        if self.online and self.config.actor_rollout_ref.hybrid_engine:
            ending.end_drawing(self.actor_wg)

    def changes(self) -> list[int] | None:
        """How often each rank has changed what a checkpoint holds; None where one does not answer."""
        return ending.answers(self.actor_wg, "changes")

    def give_up_checkpoint(self) -> None:
        """No rank writes any more, unless it does not answer."""
        ending.answers(self.actor_wg, "give_up_checkpoint")

    @property
    def _devices(self) -> int:
        """That train, and that draw or hold teachers where those are others."""
        arr = self.config.actor_rollout_ref
        separate = self.online and not arr.hybrid_engine
        return self.layout.world + (self.num_servers if separate else 0) + arr.actor.teacher.ranks
