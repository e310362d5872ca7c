"""The language model beside the generator in a training worker: it writes with the weights that are trained.

It has a training engine of its own, of the same kind as the generator's, whose segment is replayed by `Tokens`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl_omni.algorithms.token_loss import TokenLoss
from verl_omni.config import (
    DiffusionActorConfig,
    DiffusionModelConfig,
    DiffusionRolloutConfig,
    RewriterConfig,
)
from verl_omni.pipelines.causal_lm import CausalLM, load_tokenizer, writer_of
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.utils.errors import RunError
from verl_omni.workers.columns import Ragged
from verl_omni.workers.engine.registry import engine_class
from verl_omni.workers.engine.replay import Batch
from verl_omni.workers.engine.tokens import Tokens, text_columns
from verl_omni.workers.first_ratio import ROUNDING
from verl_omni.workers.old_log_probs import choose_old_log_probs
from verl_omni.workers.rollout.image_token_rollout import ImageTokenRollout
from verl_omni.workers.rollout.text_rollout import TextRollout

FOLDER = "rewriter"  # in a checkpoint
ROLLOUT_RATIO, ROLLOUT_RATIO_MEAN = "rollout_ratio_max_dev", "rollout_ratio_mean_dev"


class Rewriter:
    def __init__(
        self,
        config: RewriterConfig,
        actor: DiffusionActorConfig,
        rollout: DiffusionRolloutConfig,
        generator: DiffusionModelConfig | None = None,
    ):
        self.config, self.actor = config, actor
        architecture, writer = writer_of(config.path)
        self.writes_images = writer.drawn_by is not None
        engine = engine_class("fsdp2")
        plain = {"use_torch_compile": False, "compile_ahead": False, "fold_lora": None, "attention_backend": None}
        self.engine = engine(
            model_config=DiffusionModelConfig(path=config.path, architecture=architecture),
            engine_config=dataclasses.replace(actor.fsdp_config, ulysses_sequence_parallel_size=1),
            optimizer_config=dataclasses.replace(actor.optim, lr=config.lr),
            checkpoint_config=actor.checkpoint,
            replay=functools.partial(Tokens, temperature=config.temperature),
            common=dataclasses.replace(actor.engine, **plain),
        )
        self.engine.initialize()
        self.engine.micro_batch_size = config.micro_batch_size_per_gpu
        self.rollout = self._rollout(writer, rollout.max_num_seqs, generator)
        self.loss = TokenLoss(config.loss, config.clip_ratio, actor.diffusion_loss.adv_clip_max)

    def _rollout(
        self, writer: type[CausalLM], max_num_seqs: int, generator: DiffusionModelConfig | None
    ) -> TextRollout:
        config, module, device, autocast = self.config, self.engine.module, self.engine.device, self.engine.autocast
        if self.writes_images:
            processor = DiffusionModelBase.get_class(generator).load_tokenizers(generator)["processor"]
            return ImageTokenRollout(writer, config, module, processor, device, autocast, max_num_seqs)
        tokenizer = load_tokenizer(self.engine.model_config.path)
        if config.rollout == "vllm":
            from verl_omni.workers.rollout.vllm_rollout.texts import VllmTextRollout

            return VllmTextRollout(config, self.engine, tokenizer, max_num_seqs)
        return TextRollout(config, module, tokenizer, device, autocast, max_num_seqs)

    @property
    def exact(self) -> bool:
        """Whether the rollout's log-probabilities are those of training."""
        return self.rollout.same_arithmetic and self.engine.rounds_like_rollout

    @property
    def is_trained(self) -> bool:
        return self.config.train != "generator"

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Its weights are those of training inside, and no rank waits for another's longest text."""
        self.rollout.version = version
        with self.engine.eval_mode(), self.rollout.holding(self.engine):
            yield

    # ---- training ------------------------------------------------------------------------------------

    def with_old(self, mini: Batch) -> Batch:
        """With the log-probabilities that ratios are to: the rollout's own, where they are exact, or a pass now."""
        old = choose_old_log_probs(self.actor.old_log_probs, self.exact)
        if old.source == "rollout":
            return mini | {"text_old_log_probs": mini["text_log_probs"]}
        every = {name: value for name, value in text_columns(mini).items() if name != "share"}
        found = self.engine.infer_batch(every, training_graph=True)["model_output"]["log_probs"]
        own = [found[i][: len(text)] for i, text in enumerate(mini["text_ids"].rows)]
        return mini | {"text_old_log_probs": Ragged(own)}

    def train(self, mini: Batch, first: bool) -> dict[str, float]:
        """One optimizer step. Before the `first` one, rollout and training agree on every token."""
        check = self._check_first_ratio if first else None
        return self.engine.train_batch(text_columns(mini), self.loss, check)["metrics"]

    def _check_first_ratio(self, metrics: Mapping[str, float]) -> None:
        tolerance, exact = self.actor.first_ratio_tolerance, self.exact
        off = metrics[ROLLOUT_RATIO if exact else ROLLOUT_RATIO_MEAN]
        if tolerance is not None and off > tolerance * (1 if exact else ROUNDING):
            raise RunError(
                f"before the first update a token's ratio of training to rollout is off by {off:.2g}, more than "
                f"actor_rollout_ref.actor.first_ratio_tolerance={tolerance:g}{'' if exact else f' times {ROUNDING}'}: "
                f"does {self.config.path} compute the same {self.rollout.compared}?"
            )

    # ---- checkpoints ---------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        self.engine.save_checkpoint(str(Path(path, FOLDER)))

    def load(self, path: str) -> None:
        self.engine.load_checkpoint(str(Path(path, FOLDER)))
