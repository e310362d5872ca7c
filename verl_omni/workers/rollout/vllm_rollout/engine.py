"""The rollout engine on vLLM-Omni: its pipeline and kernels, our denoising loop. One device, in this process."""

import contextlib
import functools
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.utils.device import get_torch_device

import verl_omni.utils.cpu_platform  # noqa: F401  (before verl asks for a platform)
from verl_omni.config import DiffusionModelConfig, DiffusionRolloutConfig
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.perf.memory import names_memory_knobs
from verl_omni.pipelines.drawing import Drawer, Request, equal_parts
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.pipelines.vllm_omni import VllmOmniPipelineBase
from verl_omni.utils.quiet_libraries import keep_vllm_quiet
from verl_omni.workers.engine.module import autocast
from verl_omni.workers.engine.protocol import TrainingEngine
from verl_omni.workers.host_memory import HostMemory, bring
from verl_omni.workers.rollout.base import RolloutOutput
from verl_omni.workers.rollout.batched import BatchedRollout, answer
from verl_omni.workers.rollout.vllm_rollout.checks import check_model
from verl_omni.workers.rollout.vllm_rollout.loading import TrainedWeights


class VllmOmniRollout(BatchedRollout):
    has_a_copy = True
    gives_latents = True
    why_no_precision = (
        "quantises the weights that it reads from the model's folder, and takes no trained ones after that"
    )

    def __init__(
        self,
        config: DiffusionRolloutConfig,
        model_config: DiffusionModelConfig,
        dtype: torch.dtype,
        compiled: bool,
        prompt_cache_size: int = 4096,
        decode_batch_size: int = 16,
        prompt_cache_megabytes: int = 8192,
    ):
        super().__init__(config, model_config)
        self.engine = build_engine(config, model_config, dtype, compiled)
        pipeline = self.engine.pipeline
        for name in pipeline._encoder_modules:
            if getattr(pipeline, name) is not None:  # Wan's first frames have a CLIP in some models only
                cast_parameters(getattr(pipeline, name), dtype)
        self.drawer = pipeline.drawer = Drawer(
            model_config,
            pipeline,
            pipeline.as_diffusers(model_config),
            self.engine.device,
            functools.partial(autocast, self.engine.device, dtype),
            config.cfg_in_one_forward,
            prompt_cache_size,
            equal_parts(config.max_num_seqs, decode_batch_size),
            prompt_cache_megabytes,
        )
        if config.vae_tiling:
            pipeline.vae.enable_tiling()
        self.weights = TrainedWeights(pipeline, model_config, dtype)
        # Of an engine beside training: the policy and version that it has, and where it waits.
        self._held: tuple[str, int] | None = None
        self._host = HostMemory()
        self.seconds: dict[str, float] = {}

    @classmethod
    def check(cls, settings: DiffusionTrainerConfig) -> None:
        check_model(settings.actor_rollout_ref.model)

    @classmethod
    def receives(cls, model_config: DiffusionModelConfig, dtype: torch.dtype) -> torch.dtype | None:
        """All weights are held in `dtype`. Adapters are added to others first, in float32."""
        return None if model_config.lora_rank else dtype

    @classmethod
    def beside(
        cls, training: TrainingEngine, config: DiffusionRolloutConfig, model_config: DiffusionModelConfig
    ) -> "VllmOmniRollout":
        """With a copy of the model, which leaves the device while others compute.

        Its blocks are not compiled: what training allows the compiler in this process is meant for its own.
        """
        rollout = cls(config, model_config, training.dtype, compiled=False, **config.engine_kwargs)
        rollout.sleep()
        return rollout

    @contextlib.contextmanager
    def with_policy(self, training: TrainingEngine, policy: str, version: int) -> Iterator[None]:
        with self._counted("wake"):
            self.wake()
        try:
            if self._held != (policy, version):
                self._held = None  # neither, where it fails halfway
                with self._counted("weights"), training.eval_mode(), training.policy(policy):
                    rounded = self.receives(self.model_config, training.dtype)
                    weights, peft_config = training.get_per_tensor_param(dtype=rounded)
                    self.update_weights(weights, version, peft_config)
                self._held = (policy, version)
            yield
        finally:
            with self._counted("sleep"):
                self.sleep()

    @contextlib.contextmanager
    def _counted(self, phase: str) -> Iterator[None]:
        """Waits for the device, three times a rollout."""
        began = time.perf_counter()
        yield
        get_torch_device().synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - began

    def take_seconds(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return seconds

    def sleep(self) -> None:
        """The model waits in the CPU's memory. Where it is there anyway, nothing moves."""
        if self.engine.device.type != "cpu":
            drawn_with = [getattr(self.engine.pipeline, part) for part in self.weights.folder]
            self._host.take(drawn_with, overwritten=True)
            self._host.take(m for m in self.engine.pipeline.children() if m not in drawn_with)

    def wake(self) -> None:
        if self.engine.device.type != "cpu":
            bring([self.engine.pipeline], self.engine.device)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.weights.load(weights)

    def load_base(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        self.weights.load_base(weights)

    @names_memory_knobs("rollout with vLLM-Omni")
    def draw_batch(self, requests: list[Request]) -> list[RolloutOutput]:
        return [answer(sample, self.version) for sample in self.engine.draw(requests)]

    def forget_rollout(self) -> None:
        """The times, and the prompts on the device."""
        self.seconds = {}
        self.drawer.forget_device()

    def stop(self) -> None:
        super().stop()
        self.engine.close()


def cast_parameters(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Some pipelines load encoders as the folder stores them. Buffers, such as frequencies, stay as they are."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def build_engine(
    config: DiffusionRolloutConfig, model_config: DiffusionModelConfig, dtype: torch.dtype, compiled: bool
) -> Any:
    """vLLM-Omni's engine with our pipeline in it, and the weights of the model's folder."""
    DiffusionModelBase.get_class(model_config).refuse_code(model_config)
    keep_vllm_quiet()
    from vllm_omni.diffusion.data import DiffusionParallelConfig, OmniDiffusionConfig
    from vllm_omni.platforms import current_omni_platform

    from verl_omni.workers.rollout.vllm_rollout.diffusion_engine import DrawingEngine
    from verl_omni.workers.rollout.vllm_rollout.executor import InProcessExecutor

    if not dist.is_initialized():  # it would listen on a port, for ranks that there are not
        dist.init_process_group(current_omni_platform.dist_backend, store=dist.HashStore(), rank=0, world_size=1)
    pipeline = VllmOmniPipelineBase.get_class(model_config.architecture, model_config.algorithm)
    settings = OmniDiffusionConfig(
        model=os.path.expanduser(model_config.path),
        dtype=dtype,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=not compiled,
        distributed_executor_backend=InProcessExecutor,
        # Each rank of training has an engine of its own, and draws what it is asked for.
        parallel_config=DiffusionParallelConfig(data_parallel_size=dist.get_world_size()),
        custom_pipeline_args={"pipeline_class": pipeline},
        extras={},  # its default is no dict, and LTX-2 of 0.28 looks into it
    )
    settings.enrich_config()
    return DrawingEngine(settings)
