"""The process that holds teachers and nothing else. Samples come to it, and answers leave it, by reference."""

import dataclasses

from omegaconf import DictConfig
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register

from verl_omni.algorithms.forward_process import TEACHER, anchor_policies
from verl_omni.perf.memory import names_memory_knobs
from verl_omni.workers.diffusion_worker import BY_ROWS, DiffusionWorker
from verl_omni.workers.engine.teachers import only_teachers
from verl_omni.workers.losses import build_loss_function
from verl_omni.workers.rollout.trajectories import COLUMN


class TeacherWorker(DiffusionWorker):
    """Its passes are those of the training worker. Its ranks share each teacher, and have rows of their own."""

    def __init__(self, config: DictConfig):
        super().__init__(config)
        actor = self.actor_config
        spread = dataclasses.replace(actor.fsdp_config, fsdp_size=-1, ulysses_sequence_parallel_size=1)
        common = dataclasses.replace(actor.engine, param_offload=False)  # there is nothing to make room for
        self.actor_config = dataclasses.replace(actor, fsdp_config=spread, engine=common)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @names_memory_knobs("loading of the teachers")
    def init_model(self) -> None:
        actor = self.actor_config
        self.engine = only_teachers(self._new_engine(), actor.teacher.path)
        own = self.ref_config.log_prob_micro_batch_size_per_gpu  # there is one where the actor's is to be found (auto)
        self.engine.micro_batch_size = own or actor.ppo_micro_batch_size_per_gpu
        self.engine.rows_per_unit = build_loss_function(actor).loss_fn.rows_per_unit
        policies = anchor_policies(self.model_config.algorithm, actor)
        self.anchors = {name: policy for name, policy in policies.items() if policy == TEACHER}
        self._say_place()

    @register(dispatch_mode=BY_ROWS)
    @names_memory_knobs("pass of teachers on devices of their own")
    def teach(self, data: DataProto) -> DataProto:
        """Where others find what each row's teacher says: means of its stored steps, or velocities at its levels."""
        if self.anchors:
            minis = [self.engine.before_update(mini, self.anchors) for mini in self._mini_batches(data)]
            found = {name: [row for mini in minis for row in mini[name]] for name in self.anchors}
            self.trajectories.add(data, found)
        else:
            self._per_step(data, teacher_prev_sample_mean=self._teacher_means(data))
        answers = self.trajectories.lent(data, lambda name: name.startswith(f"{TEACHER}_"))
        self.trajectories.rows = {}
        return DataProto(non_tensor_batch={COLUMN: answers})
