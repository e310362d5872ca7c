"""What all trainers share: one process that orders the work and holds nothing heavy.

`BaseRayDiffusionTrainer` starts workers, validates, checkpoints and logs; a subclass owns one training step.
"""

import contextlib
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import DictConfig, OmegaConf
from ray.exceptions import ActorUnavailableError
from torch.utils.data import Dataset, Sampler
from tqdm import tqdm
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.trainer.ppo.utils import Role

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.agent_loop.manager import DiffusionAgentLoopManager
from verl_omni.agent_loop.outputs import side_by_side
from verl_omni.algorithms.registry import get_algorithm
from verl_omni.data.prompt_loader import create_dataloader, create_val_dataloader, steps_for_epochs
from verl_omni.pipelines.settings import validation_sampling
from verl_omni.report.starts import note_start, typed_command
from verl_omni.report.timeline import Timeline
from verl_omni.report.tracking import Tracking, readable
from verl_omni.rewards.choice import read_choices, weighted
from verl_omni.trainer.diffusion.diffusion_metric_utils import (
    compute_data_metrics_diffusion,
    compute_mfu_metrics,
    compute_throughput_metrics_diffusion,
    compute_timing_metrics_diffusion,
)
from verl_omni.trainer.diffusion.ending import WholeStep, changes, report, save_what_is_whole, where_things_are
from verl_omni.trainer.diffusion.experience import Experience
from verl_omni.trainer.diffusion.filter_groups import GroupFilter
from verl_omni.trainer.diffusion.idle import Balance, shares
from verl_omni.trainer.diffusion.modes import PACES
from verl_omni.trainer.diffusion.ordering import minibatch_order
from verl_omni.trainer.diffusion.pace import Pace
from verl_omni.trainer.diffusion.reward_metrics import RewardWatch, reward_metrics
from verl_omni.trainer.diffusion.rollouts import (
    EmbeddedRollouts,
    ServerRollouts,
    by_checkpoint_engine,
    start_servers,
)
from verl_omni.trainer.diffusion.sampling import Sampling
from verl_omni.trainer.diffusion.validation import (
    validation_metrics,
    write_samples,
    write_training_samples,
)
from verl_omni.trainer.diffusion.zero_gradient import ZeroGradients
from verl_omni.trainer.failures import know
from verl_omni.trainer.interrupts import stop_requested
from verl_omni.trainer.placement import SERVERS, Placement
from verl_omni.trainer.progress import Stages, progress, tell, timer
from verl_omni.trainer.resources import busy_at_once, rendezvous_ports, worker_environment
from verl_omni.trainer.run_folder import checkpointing
from verl_omni.trainer.run_folder import record as run_record
from verl_omni.trainer.run_folder.log import terminal
from verl_omni.trainer.run_folder.resuming import Start, plan_start
from verl_omni.trainer.run_folder.saving import Saving, is_due
from verl_omni.utils.masking import masked
from verl_omni.utils.seeds import derive_seed
from verl_omni.workers.engine.registry import layout_of
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.rollout.trajectories import COLUMN


class BaseRayDiffusionTrainer(Sampling):
    """Workers, data, validation, checkpoints and logging, shared by all ways of training."""

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        role_worker_mapping: dict[Role, type[Worker]],
        resource_pool_manager: Placement,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        processor: Any = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        collate_fn: Any = None,
        train_sampler: Sampler | None = None,
        device_name: str | None = None,
    ):
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.settings = OmegaConf.to_object(config)
        self.record = run_record.describe(config)  # before anything is filled in: as a later start will see it
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.device_name = device_name or config.trainer.device
        self.algorithm = get_algorithm(config.actor_rollout_ref.model.algorithm)
        self.online = config.algorithm.sample_source == "online"
        self.loss_function = build_loss_function(self.settings.actor_rollout_ref.actor)
        self.layout = layout_of(self.settings)
        self.group_filter = GroupFilter(self.settings) if config.algorithm.filter_groups.enable else None
        self.run_dir = Path(config.trainer.default_local_dir).expanduser()
        self.train_dataset, self.val_dataset = train_dataset, val_dataset
        self.global_step = 0
        self.trained_groups: dict[str, Any] | None = None  # of steps that are not trained as a whole
        self.whole: WholeStep | None = None
        self.saving, self.timeline = Saving(self.settings.trainer), Timeline()
        self._create_dataloaders(collate_fn, train_sampler)

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
        self._set_schedule_length()
        self.resource_pool_manager.create_resource_pool()
        pool = self.resource_pool_manager.get_resource_pool(Role.ActorRollout)
        actor = RayClassWithInitArgs(self.role_worker_mapping[Role.ActorRollout], config=self.config)
        self.actor_wg = self.ray_worker_group_cls(
            resource_pool=pool,
            ray_cls_with_init=actor,
            device_name=self.device_name,
            worker_env=worker_environment(
                self.device_name, busy_at_once(self.config, self.config.trainer.n_gpus_per_node)
            ),
            master_port_range=rendezvous_ports(),
        )
        know("model worker", self.actor_wg.workers)
        self.reward_loop_manager = self.agent_loop_manager = self.rollouts = None
        if self.online:
            from verl_omni.rewards.reward_loop import RewardLoopManager

            if self.config.actor_rollout_ref.hybrid_engine:
                self.rollouts = EmbeddedRollouts(self.actor_wg, self.layout)
            else:
                places = self.resource_pool_manager.options(SERVERS)
                servers = start_servers(self.config, self.device_name, places)
                know("rollout server", servers)
                engine = self.config.actor_rollout_ref.rollout.checkpoint_engine.backend
                send = by_checkpoint_engine(self.config, self.actor_wg.workers, servers) if engine else None
                self.rollouts = ServerRollouts(servers, self.actor_wg, self.timeline, send)
                self.rollouts.watch()
            # Their processes start up while the workers load the model.
            self.reward_loop_manager = RewardLoopManager(self.config, self.resource_pool_manager.options)
            self.agent_loop_manager = DiffusionAgentLoopManager(
                self.config, self.rollouts.servers, self.reward_loop_manager.reward_loop_worker_handles
            )
            know("reward process", self.reward_loop_manager.reward_loop_workers)
            know("agent process", self.agent_loop_manager.workers)
            self._listen()
        self._load_models()

    def _load_models(self) -> None:
        """In all processes at once. A rollout server that cannot start is told before training has loaded."""
        training = self.actor_wg.execute_all_async("init_model")
        servers = [] if self.rollouts is None else self.rollouts.loading()
        waiting = [*training, *servers]
        while waiting:
            (done,), waiting = ray.wait(waiting)
            with contextlib.suppress(ActorUnavailableError) if done in servers else contextlib.nullcontext():
                ray.get(done)  # a server that has died loads again

    def _listen(self) -> None:
        """Let people look at the policy, where that is asked for. A port that is taken is told before models load."""
        port = self.config.actor_rollout_ref.rollout.http.port
        if port is not None:
            self.rollouts.listen(port)

    def _set_schedule_length(self) -> None:
        """The learning-rate schedule counts optimizer steps."""
        actor, data = self.config.actor_rollout_ref.actor, self.config.data
        if actor.optim.total_training_steps is None:
            per_step = data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
            actor.optim.total_training_steps = max(1, self.total_steps * per_step)  # none to train: val_only

    def shutdown(self) -> None:
        for manager in (self.agent_loop_manager, self.reward_loop_manager, self.rollouts):
            if manager is not None:
                manager.shutdown()

    # ---- validation ----------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Score the validation prompts with the same seeds every time, and keep the images."""
        rollout = self.settings.actor_rollout_ref.rollout
        val, sampling = rollout.val_kwargs, validation_sampling(rollout, self.settings.actor_rollout_ref.model)
        policy = "ema" if self.settings.actor_rollout_ref.actor.ema_decay else "current"
        folder, limit = self.run_dir / "validation" / f"step_{self.global_step}", self.config.trainer.log_val_images
        outputs, start = [], 0
        for rows in self.val_loader:
            batch = DataProto.from_single_dict(rows)
            seeds = range(val.seed + start, val.seed + start + len(batch) * val.n)  # as a user counts them
            batch = self._rollout_batch(batch, val.n, seeds, sampling, self.global_step)
            batch.meta_info["scores_only"] = True  # who draws the images writes them
            files = {i: str(folder / f"{start + i:05d}") for i in range(len(batch)) if limit < 0 or start + i < limit}
            start += len(seeds)
            output, scores = self._draw(batch, policy, files)()
            outputs.append(side_by_side(output, scores()))
            outputs[-1].meta_info = {}  # times, which differ; verl joins only what is equal
        joined = DataProto.concat(outputs)
        write_samples(joined, folder)
        return validation_metrics(joined, val.n)

    # ---- checkpoints ---------------------------------------------------------------------------------

    def save_checkpoint(self, last: bool = False) -> None:
        keep = self.config.trainer.max_ckpt_to_keep
        self.saving.begins(self.global_step)
        checkpointing.check_room(self.run_dir, self.actor_wg.checkpoint_bytes()[0])
        with checkpointing.publish(self.run_dir, self.global_step, self.record, keep) as folder:
            self.actor_wg.save_checkpoint(str(folder), self.global_step)
            checkpointing.write_data_state(folder, self.whole.data, self.whole.validation_due)
            if not self.saving.is_asked_for(self.global_step, last):
                self.saving.mark(folder)
        self.saving.saved(self.run_dir, self.global_step)

    def load_checkpoint(self) -> Start:
        """Go on from the checkpoint that `trainer.resume_mode` names, if there is one."""
        start = plan_start(self.config, self.total_steps, self.record)
        if start.source is None:
            return start
        self.actor_wg.load_checkpoint(str(start.source))
        self.global_step = start.step
        self.saving.begins(start.step)  # it is there
        if self.train_loader is None:
            print(f"Validating {start.source}.", flush=True)
            return start
        state = checkpointing.data_state(start.source)
        other = self.train_loader.order_changes(state)
        if other and self.config.trainer.resume_changes == "allow":
            print(f"The prompts start at the beginning of a new order: {'; '.join(other)}.", flush=True)
        else:
            self.train_loader.load_state_dict(state)
            self.trained_groups = state.get("groups")
        print(f"Resuming from {start.source}: step {self.global_step} of {self.total_steps} is done.", flush=True)
        return start

    def _write_config(self, start: Start) -> None:
        """`config.yaml` is that of the run's start; what changed later is written beside it, never over it."""
        path = self.run_dir / "config.yaml"
        if path.exists() and (start.source is not None or self.config.trainer.val_only):
            if self.config.trainer.val_only or not start.changed:
                return
            path = path.with_name(f"config.step_{start.step}.yaml")
        OmegaConf.save(OmegaConf.create(masked(OmegaConf.to_container(self.config, resolve=True))), path)

    # ---- the loop ------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train to the last step: validate, save and log as the config says."""
        trainer = self.config.trainer
        self.run_dir.mkdir(parents=True, exist_ok=True)
        tell(stage="loading of the checkpoint")
        start = self.load_checkpoint()
        if not trainer.val_only:
            checkpointing.begin(self.run_dir, start.source)
        self._write_config(start)
        # In an actor the command was typed elsewhere. Without a Ray the question itself would start one.
        in_cluster = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
        note_start(self.run_dir, self.global_step, None if in_cluster else typed_command())
        tracking = Tracking(
            list(trainer.logger),
            self.run_dir,
            trainer.project_name,
            trainer.experiment_name,
            config=masked(OmegaConf.to_container(self.config, resolve=True)),
            resumed_step=start.step if start.source else None,
            total_steps=self.total_steps,
            only_adds=trainer.val_only,
        )
        before = trainer.val_only or start.validation_due or (trainer.val_before_train and start.source is None)
        try:
            if self.val_loader is not None and self.online and before:
                with timer({}, "testing"):
                    tracking.log(self.validate(), step=self.global_step)
            if not trainer.val_only:
                with contextlib.closing(PACES[trainer.mode](self)) as self.pace:
                    self._train(tracking)
        except (Exception, KeyboardInterrupt) as error:
            if isinstance(error, Exception) or not stop_requested():  # nobody asked: there is no Ray any more
                save_what_is_whole(self)
                report(self)
            raise
        tracking.finish()
        written = report(self)
        if not self.stopped:
            print(where_things_are(self.run_dir, self.global_step, written), flush=True)

    @property
    def stopped(self) -> bool:
        """Asked to end before its last step."""
        return stop_requested() and self.global_step < self.total_steps

    def _train(self, tracking: Tracking) -> None:
        rewards = weighted(read_choices(self.settings.reward.scorers))
        zero_gradients, watch = ZeroGradients(), RewardWatch(rewards)
        if not self.config.actor_rollout_ref.hybrid_engine:
            self.timeline.write_to(self.run_dir, self.global_step or None)
        balance = Balance(self.layout.world, len(self.rollouts.servers) if self.pace.overlaps else 0)
        shown = {"total": self.total_steps, "initial": self.global_step, "desc": "training", "unit": "step"}
        with tqdm(**shown, file=terminal(), disable=None) as bar:  # in a log file there are lines, and no bar
            while self.global_step < self.total_steps and not stop_requested():
                timing = Stages()
                tell(stage="training", step=self.global_step + 1)
                profiled = self.global_step + 1 == self.config.trainer.profile_step
                if profiled:
                    self.actor_wg.start_profile()
                with timer(timing, "step"):
                    batch, metrics = self.training_step(self.pace, timing)
                if profiled:
                    self.actor_wg.stop_profile(str(self.run_dir))
                self.global_step += 1
                self.whole = WholeStep(self.global_step, self.pace.data_state(), self.changes())
                metrics |= compute_data_metrics_diffusion(batch) | reward_metrics(batch, rewards)
                if self.online:
                    write_training_samples(batch)
                for line in watch.see(metrics):
                    print(f"step {self.global_step}: {line}", flush=True)
                if self.pace.overlaps:
                    metrics |= shares(timing)
                    if line := balance.see(timing):
                        print(line, flush=True)
                stalled = zero_gradients.see(metrics, self.global_step)
                last = stalled or self.global_step == self.total_steps
                testing = self.val_loader is not None and self.online
                try:
                    if testing and is_due(self.global_step, self.config.trainer.test_freq, last):
                        self.whole.validation_due = True
                        with timer(timing, "settle"):
                            self.pace.settle()
                        with timer(timing, "testing"):
                            metrics |= self.validate()
                        self.whole.validation_due = False
                finally:  # the step is done, and may be saved without its validation
                    self._log_step(tracking, batch, metrics, timing)
                # After the line is written: a run that goes on from this checkpoint keeps all lines up to it.
                if self.saving.is_due(self.global_step, last):
                    saving: dict[str, float] = {}
                    with timer(saving, "save_checkpoint"):
                        self.save_checkpoint(last)
                    tracking.log({"timing_s/save_checkpoint": saving["save_checkpoint"]}, step=self.global_step)
                reward = metrics.get("critic/rewards/mean")  # cached pairs have none
                shown = {} if reward is None else {"reward": readable(reward)}
                bar.set_postfix(shown | {"step": f"{timing['step']:.1f}s"})
                bar.update()
                tell(done=progress.done + 1)
                if stalled:
                    zero_gradients.end(metrics, self.global_step)
            if self.stopped and self.saving.misses(self.global_step):  # the signal came just after the question
                self.save_checkpoint()

    def changes(self) -> list[int] | None:
        """How often each rank has changed what a checkpoint holds; None where one does not answer."""
        return changes(self.actor_wg)

    def _log_step(self, tracking: Tracking, batch: DataProto, metrics: dict[str, float], timing: Stages) -> None:
        metrics |= compute_mfu_metrics(metrics, timing)
        metrics |= compute_timing_metrics_diffusion(timing, len(batch))
        metrics |= compute_throughput_metrics_diffusion(batch, timing, self._devices)
        metrics["training/global_step"] = self.global_step
        tracking.log(metrics, step=self.global_step)
        self.timeline.add_stages(timing.spans)
        self.timeline.write(self.global_step)

    @property
    def _devices(self) -> int:
        """That train, and that draw where those are others."""
        separate = self.online and not self.config.actor_rollout_ref.hybrid_engine
        return self.layout.world + (len(self.rollouts.servers) if separate else 0)

    def training_step(self, pace: Pace, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """One step on the next experience: (the batch with its rewards, metrics)."""
        with timer(timing, "gen"):
            experience = pace.next()
        batch, metrics = self.learn(experience, timing)
        metrics |= pace.metrics(batch) | experience.metrics
        if self.online:
            self.actor_wg.release(experience.names)
            batch.non_tensor_batch.pop(COLUMN, None)  # what Ray stores goes with the last reference
        return batch, metrics

    def learn(self, experience: Experience, timing: dict[str, float]) -> tuple[DataProto, dict[str, float]]:
        """Rewards, advantages, update; it does not know which engine drew the samples."""
        raise NotImplementedError

    def _scored(self, experience: Experience, timing: dict[str, float]) -> DataProto:
        """An experience with its rewards; they were computed meanwhile, and this is what is left to wait for."""
        with timer(timing, "reward"):
            batch = side_by_side(experience.batch, experience.scores)
        timing |= {f"gen_{phase}": seconds for phase, seconds in batch.meta_info.pop("timing").items()}
        batch.batch["sample_level_rewards"] = batch.batch["rm_scores"][:, 0]
        return batch

    def _seed(self, purpose: str, step: int | None = None) -> int:
        """What the trainer draws at this step, or at another: a seed for each purpose."""
        return derive_seed(self.config.trainer.seed, purpose, self.global_step if step is None else step)

    def _training_order(self, rows: int, samples_per_prompt: int, step: int) -> torch.Tensor:
        """Row order of a step's update: the same mini-batches whatever the number of ranks."""
        actor = self.config.actor_rollout_ref.actor
        return minibatch_order(
            rows // samples_per_prompt,
            samples_per_prompt,
            self._mini_batches(rows),
            self.layout.data,
            seed=self._seed("mini-batches", step) if actor.shuffle else None,
        )

    def _mini_batches(self, rows: int) -> int:
        """Optimizer steps over so many samples."""
        arr = self.config.actor_rollout_ref
        return rows // (arr.actor.ppo_mini_batch_size * arr.rollout.n)

    def _update_actor(self, batch: DataProto, mini_batches: int, stale: bool) -> dict[str, float]:
        """Optimizer steps over a batch that is in training order; `stale`: earlier weights drew it."""
        epochs = self.config.actor_rollout_ref.actor.ppo_epochs
        batch.meta_info = {"num_mini_batches": mini_batches, "epochs": epochs, "stale": stale}
        return self.actor_wg.update_actor(batch)[0]
