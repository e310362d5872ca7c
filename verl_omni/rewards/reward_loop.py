"""verl's reward loop for images: workers that score finished images while others are still being made."""

from typing import Any

import ray
from omegaconf import DictConfig, OmegaConf
from verl.experimental.reward_loop.reward_loop import RewardLoopManager as VerlRewardLoopManager
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker as VerlRewardLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.reward import resolve_reward_manager_cls

import verl_omni.rewards.image_manager  # noqa: F401  (registers "image")
import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.rewards.choice import read_choices
from verl_omni.rewards.judge import JUDGE, start_judges, with_judge
from verl_omni.rewards.pool import Places, ScorerPool, start_pools
from verl_omni.rewards.registry import columns_of, get_reward_fn
from verl_omni.rewards.reward_function import RewardFunction
from verl_omni.rewards.validation import COLUMN as VALIDATES
from verl_omni.rewards.validation import for_validation, has_own
from verl_omni.utils.arrays import object_array
from verl_omni.utils.external_lib import import_external_lib

MOST_IMAGES = 100_000  # that wait for their scores at one worker


def load_custom_reward_function(reward_config: DictConfig) -> RewardFunction | None:
    """The user's function, or None where the rewards of the data sources are to be used."""
    custom = reward_config.custom_reward_function
    return RewardFunction.of(custom, reward_config.timeout) if custom.path else None


class RewardLoopWorker(VerlRewardLoopWorker):
    def _init_reward_fn(self) -> None:
        import_external_lib(self.config.actor_rollout_ref.model.external_lib)
        self.reward_model_tokenizer: Any = None
        self.reward_manager = self.validation_manager = self._manager(self.config)
        if has_own(self.config):
            self.validation_manager = self._manager(for_validation(self.config))

    def _manager(self, config: DictConfig) -> Any:
        return resolve_reward_manager_cls(config)(
            config=config,
            tokenizer=None,
            compute_score=load_custom_reward_function(config.reward),
            reward_router_address=self.reward_router_address,
            reward_model_tokenizer=self.reward_model_tokenizer,
        )

    async def use_pools(self, pools: dict[str, list[Any]]) -> None:
        """Rewards that have processes of their own, by label."""
        rewards = {label: get_reward_fn(self.reward_manager.choices[label].name) for label in pools}
        takes = {label: [column.name for column in columns_of(reward)] for label, reward in rewards.items()}
        self.reward_manager.pools = {label: ScorerPool(processes, takes[label]) for label, processes in pools.items()}

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        manager = self.validation_manager if VALIDATES in data.non_tensor_batch else self.reward_manager
        return await manager.run_single(data)

    async def is_awake(self) -> bool:
        """Answered as long as a reward function lets this process do anything else."""
        return True


class RewardLoopManager(VerlRewardLoopManager):
    """Starts the reward workers. `compute_rm_score` scores a whole batch, for rewards that cannot overlap a rollout."""

    def __init__(self, config: DictConfig, places: Places):
        """`places` are those of the judges and of rewards that have processes of their own, by name."""
        self.config, self.places = config, places
        self.judges, self.reward_router_address = [], None
        self.reward_model_manager, self.reward_manager_cls = None, resolve_reward_manager_cls(config)
        if config.reward.reward_model.enable:
            model = OmegaConf.to_object(config.reward.reward_model)
            self.judges, self.reward_router_address = start_judges(
                model, config.trainer.default_local_dir, places(JUDGE), config.ray.placement_timeout
            )
        self._init_reward_loop_workers()

    @property
    def reward_loop_worker_handles(self) -> list[ray.actor.ActorHandle]:
        return self.reward_loop_workers

    def _init_reward_loop_workers(self) -> None:
        # As many as there may be images: a worker that waits for scores must still say that it is awake.
        self.reward_loop_workers_class = ray.remote(num_cpus=0, max_concurrency=MOST_IMAGES)(RewardLoopWorker)
        super()._init_reward_loop_workers()
        scorers = self.config.reward.scorers
        choices = read_choices(OmegaConf.to_container(scorers, resolve=True) if scorers else None)
        if self.reward_router_address is not None:
            choices = with_judge(choices, self.reward_router_address, self.config.reward.reward_model.model_path)
        self.pools = start_pools(choices, self.config.actor_rollout_ref.model.external_lib, self.places)
        if self.pools:
            ray.get([worker.use_pools.remote(self.pools) for worker in self.reward_loop_workers])

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """verl's scores, with what else a reward tells in one column, `reward_extra_info`, as in a rollout."""
        result = super().compute_rm_score(data)
        told = {key: result.non_tensor_batch.pop(key) for key in result.meta_info.pop("reward_extra_keys")}
        rows = [{key: values[i] for key, values in told.items()} for i in range(len(result))]
        result.non_tensor_batch["reward_extra_info"] = object_array(rows)
        return result

    def shutdown(self) -> None:
        # A judge's server, and what that has started, end with the process that started it.
        for process in (*self.reward_loop_workers, *(p for pool in self.pools.values() for p in pool), *self.judges):
            ray.kill(process)
