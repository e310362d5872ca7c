"""One run: its checks, its Ray, its workers and its trainer."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_omni.config import schema
from verl_omni.trainer import interrupts
from verl_omni.trainer.failures import in_one_line, know
from verl_omni.trainer.progress import DRAWS, WAITED_FOR, name_stage, progress, tell

schema.register()


class TaskRunner:
    """Builds the worker mapping and runs the trainer that `algorithm.trainer_type` names."""

    def __init__(self) -> None:
        self.role_worker_mapping: dict[Any, Any] = {}
        self.mapping: dict[Any, str] = {}
        self.actor_class: Any = None

    def add_actor_rollout_worker(self, config: DictConfig) -> Any:
        """The worker that trains, generates (embedded engine) and serves as its own reference."""
        import ray
        from verl.trainer.ppo.utils import Role

        from verl_omni.trainer.placement import TRAINING
        from verl_omni.workers.rewriting_worker import worker_class

        worker = worker_class(config)
        self.role_worker_mapping[Role.ActorRollout] = ray.remote(worker)
        self.mapping[Role.ActorRollout] = TRAINING
        return worker

    def add_ref_policy_worker(self, config: DictConfig, ref_policy_cls: Any) -> None:
        """The reference lives in the actor's worker: adapters off (LoRA), or a copy of its starting weights (full).

        There is nothing to add. A runner that wants another class for it is told so, instead of being ignored.
        """
        if self.actor_class not in (None, ref_policy_cls):
            raise ValueError(
                f"the reference lives in the worker that trains, {self.actor_class.__name__}, and has no worker of its "
                f"own: {ref_policy_cls.__name__} would not be used"
            )

    def add_reward_model_resource_pool(self, config: DictConfig) -> None:
        """A reward model that is served beside the training has a pool of its own."""
        from verl.trainer.ppo.utils import Role

        from verl_omni.rewards.judge import JUDGE

        if config.reward.reward_model.enable:
            self.mapping[Role.RewardModel] = JUDGE

    def init_resource_pool_mgr(self, config: DictConfig) -> Any:
        """A pool for each kind of process that needs devices."""
        from verl_omni.trainer.placement import Placement, all_wanted

        return Placement(all_wanted(config), self.mapping, config.ray.placement_timeout)

    def report(self) -> dict[str, Any]:
        """Where the run is."""
        return {name: getattr(progress, name) for name in ("stage", "step", "total", "done", "report")}

    def stop(self) -> bool:
        """Finish the step, save, and end."""
        interrupts.request_stop()
        return True

    def run(self, config: DictConfig) -> None:
        with in_one_line():
            self._run(config)

    def _run(self, config: DictConfig) -> None:
        from verl_omni.data.loading import load_datasets
        from verl_omni.data.offline_pairs import collate_pairs
        from verl_omni.trainer.diffusion import ray_diffusion_trainer as trainers
        from verl_omni.utils.external_lib import import_external_lib

        import_external_lib(config.actor_rollout_ref.model.external_lib)  # this may be a process of its own
        worker = self.actor_class = self.add_actor_rollout_worker(config)
        self.add_ref_policy_worker(config, worker)
        self.add_reward_model_resource_pool(config)
        train_dataset, val_dataset = load_datasets(config)
        trainer_class = {
            "policy_gradient": trainers.PolicyGradientRayTrainer,
            "direct_preference": trainers.DirectPreferenceRayTrainer,
        }[config.algorithm.trainer_type]
        trainer = trainer_class(
            config=config,
            tokenizer=None,
            role_worker_mapping=self.role_worker_mapping,
            resource_pool_manager=self.init_resource_pool_mgr(config),
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_pairs if config.algorithm.sample_source == "offline" else None,
            device_name=config.trainer.device,
        )
        trainer.init_workers()
        trainer.fit()
        trainer.shutdown()
        if trainer.stopped:
            raise interrupts.Stopped(f"stopped after step {trainer.global_step} of {trainer.total_steps}")


def run_diffusion(config: DictConfig, task_runner_class: Any = None, quiet: bool = False, asked: bool = False) -> None:
    """Check the configuration, start Ray and train.

    A cluster of our own needs no extra process for the driver; on a running cluster the runner is a Ray actor.
    With `quiet`, what libraries and workers have to say goes to `run.log` in the run's folder. The reward was `asked`
    already where somebody did that before.
    """
    from verl_omni.trainer.checks.hub_names import fetch_models
    from verl_omni.trainer.checks.preflight import check_start, preflight
    from verl_omni.trainer.resources import check_answers, choose_device
    from verl_omni.trainer.run_folder.lock import run_lock
    from verl_omni.trainer.run_folder.resuming import finished
    from verl_omni.utils.external_lib import with_registered
    from verl_omni.utils.quiet_libraries import keep_vllm_quiet

    if quiet:
        keep_vllm_quiet()
    # Several runs may follow each other in one process.
    tell(run_dir=None, stage="start", step=0, total=0, done=0, report=None, over=None, last=None, words=None)
    check_groups(config)
    if config.ray.address is not None:
        check_answers(config.ray.address)
    model = config.actor_rollout_ref.model
    with config_writable(config):
        config.trainer.device = choose_device(config.trainer.device, config.ray.address)
        model.external_lib = with_registered(model.external_lib)
    config = preflight(config)
    if not asked:
        ask_reward(config)
    fetch_models(config)
    with run_lock(config.trainer.default_local_dir):
        start = check_start(config)
        for line in start.notices:
            print(line, flush=True)
        if start.finished:
            print(finished(start), flush=True)
        else:
            _run_on_ray(config, task_runner_class, quiet)


def ask_reward(config: DictConfig) -> None:
    """A function of the user's own is asked once before anything heavy starts."""
    from verl_omni.data.loading import load_datasets
    from verl_omni.rewards.validation import for_validation, has_own
    from verl_omni.trainer.checks.reward_trial import scored_kind, try_reward

    if config.algorithm.sample_source != "online":
        return
    train, val = load_datasets(config)
    asked = [(config, val if train is None else train)]
    if has_own(config):
        asked.append((for_validation(config), val))
    for rewards, dataset in asked:
        if told := try_reward(rewards, dataset[0], scored_kind(config)):
            print(f"warning: {told}", flush=True)


def _run_on_ray(config: DictConfig, task_runner_class: Any, quiet: bool) -> None:
    import ray

    from verl_omni.trainer.nodes import check_nodes, fetch_on_nodes
    from verl_omni.trainer.resources import start_ray
    from verl_omni.trainer.run_folder.log import keep_daemons_quiet, open_run_log

    run_dir = os.path.expanduser(config.trainer.default_local_dir)
    if quiet:
        open_run_log(run_dir)
    trainer = config.trainer
    name_stage("loading of the model", f"loading the model{size_of(config)}, starting the rewards")
    if compiles(config):
        for stage in DRAWS:
            name_stage(stage, f"compiling the model's blocks and {WAITED_FOR[stage]}")
    tell(run_dir=run_dir, resume_mode=trainer.resume_mode, saves=trainer.save_freq != 0, stage="start of Ray")
    started = not ray.is_initialized()
    try:
        with in_one_line():
            if quiet:
                keep_daemons_quiet()
            daemons = start_ray(config) if started else None
            if config.ray.address is not None:
                check_nodes(config)
                fetch_on_nodes(config)
            interrupts.listen()
            with daemons.watched() if daemons else contextlib.nullcontext():
                if task_runner_class is not None:
                    ray.get(task_runner_class.remote().run.remote(config))
                elif config.ray.address is not None:
                    run_on_cluster(config)
                else:
                    TaskRunner().run(config)
            if config.ray.timeline_json_file:
                ray.timeline(filename=config.ray.timeline_json_file)
        tell(over=0)
    finally:
        if started:
            ray.shutdown()


def compiles(config: DictConfig) -> bool:
    """Whether the first images wait for a compiler: they are drawn with the module that is trained."""
    import torch

    from verl_omni.workers.engine.module import on_gpu
    from verl_omni.workers.engine.registry import layout_of
    from verl_omni.workers.rollout import engine_class

    arr = config.actor_rollout_ref
    if arr.model.path is None:  # a language model alone, whose blocks are not compiled
        return False
    asked = on_gpu(arr.actor.engine.use_torch_compile, torch.device(config.trainer.device))
    return asked and engine_class(arr.rollout.name).same_arithmetic and layout_of(config).sequence == 1


def size_of(config: DictConfig) -> str:
    """Of the weights, where they are worth a word."""
    from verl_omni.utils.hub import model_folder

    model = config.actor_rollout_ref.model
    if model.path is None:
        return ""
    folder = Path(model_folder(model.path, model.revision, weights=False)).expanduser()
    size = sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))
    return f" ({size / 1e9:.1f} GB)" if size >= 1e8 and model.load_format != "dummy" else ""


def check_groups(config: DictConfig) -> None:
    """A recipe that does not start from our own configuration has only what it says itself."""
    lacking = [field.name for field in dataclasses.fields(schema.DiffusionTrainerConfig) if field.name not in config]
    if lacking:
        raise ValueError(
            f"the recipe lacks {', '.join(lacking)}: let it begin with the line `defaults: [diffusion_trainer, _self_]`"
        )


def run_on_cluster(config: DictConfig) -> None:
    """The runner as an actor; this process hands its reports on, and a signal to it."""
    import ray
    from ray.exceptions import RayActorError

    runner = ray.remote(TaskRunner).options(max_concurrency=2).remote()  # it reports while it runs
    know("runner", [runner])
    running, told = runner.run.remote(config), False
    while not ray.wait([running], timeout=1)[0]:
        tell(**ray.get(runner.report.remote()))
        if interrupts.stop_requested() and not told:
            told = ray.get(runner.stop.remote())
    with contextlib.suppress(RayActorError):  # it has died: `running` says so
        tell(**ray.get(runner.report.remote()))
    ray.get(running)


def config_writable(config: DictConfig) -> Any:
    from omegaconf import open_dict

    return open_dict(config)
