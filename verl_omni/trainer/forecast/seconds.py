"""How long a step takes: its arithmetic over measured rates."""

import dataclasses
import math
from dataclasses import dataclass

from verl_omni.algorithms.registry import get_diffusion_loss_fn
from verl_omni.algorithms.rollout_correction import is_on
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.perf import rates as measured
from verl_omni.perf.rates import Rates
from verl_omni.trainer.checks.correction import same_arithmetic
from verl_omni.trainer.forecast.amounts import Amounts
from verl_omni.trainer.forecast.model import ModelCosts, compiles
from verl_omni.trainer.forecast.stages import whole_model
from verl_omni.workers.engine.optimizer import optimizer_ratio
from verl_omni.workers.layout import Layout
from verl_omni.workers.old_log_probs import choose_old_log_probs

GRADIENT_BYTES = 4  # each is summed in float32


@dataclass(frozen=True)
class Seconds:
    """Of one rank, by stage. Drawing is done by all ranks, or by servers."""

    denoise: float = 0.0
    decode: float = 0.0
    rollout_overhead: float = 0.0
    reference: float = 0.0
    update: float = 0.0

    @property
    def drawing(self) -> float:
        return self.denoise + self.decode + self.rollout_overhead

    @property
    def learning(self) -> float:
        return self.reference + self.update

    @property
    def step(self) -> float:
        return self.drawing + self.learning


class StepTime:
    """`sends=False`: as if ranks had nothing to tell each other, which is what one of them alone can measure."""

    def __init__(
        self,
        costs: ModelCosts,
        settings: DiffusionTrainerConfig,
        amounts: Amounts,
        rates: Rates,
        sends: bool = True,
    ):
        self.costs, self.settings, self.amounts, self.rates, self.sends = costs, settings, amounts, rates, sends
        self.arr = settings.actor_rollout_ref

    def drawing(self, ranks: int, shared: Layout | None = None) -> Seconds:
        """With so many that draw, each with the whole model, or block by block of one that they have `shared` out, or
        several to a sample."""
        if not self.amounts.draws:
            return Seconds()
        rollout = self.arr.rollout
        together = shared if shared is not None and rollout.share_samples else None
        images = math.ceil(self.amounts.images / (together.data if together else ranks))
        requests = min(rollout.max_num_seqs, images)
        joined = self.amounts.guided and rollout.cfg_in_one_forward
        rows, halves = (2 * requests, 1) if joined else (requests, 1 + self.amounts.guided)
        forwards = math.ceil(images / requests) * self.amounts.steps * halves
        pool = rollout.pool.size or 0
        decode = 0.0
        if self.settings.reward.input == "decoded":
            decoded = self.amounts.decoded_at_once(rollout.max_num_seqs)  # as for the memory: one pass tells both
            one = self.costs.decode(decoded, rollout.vae_tiling).forward / decoded
            decode = images * (1 + pool / rollout.n) * one / self.rates.decode
        # A rank that shares samples in training has no compiled blocks, whoever draws.
        compiled = compiles(self.settings, shared.sequence if shared else 1)
        more = 1.0
        if pool:
            of_pool = pool * (rollout.pool.num_inference_steps or self.amounts.steps)
            pool_pace = self._pace(rollout.pool.precision or rollout.precision, compiled)
            pace = pool_pace / self._pace(rollout.precision, compiled)
            more += of_pool / (rollout.n * self.amounts.steps) / pace
        one = self._forward(rows, self.rates.denoise * self._pace(rollout.precision, compiled), together)
        if shared is not None and rollout.gather == "blocks":
            one = self._spread(one, shared, passes=1)
        return Seconds(
            denoise=more * forwards * one,
            decode=decode,
            rollout_overhead=measured.ROLLOUT_OVERHEAD + (self._comes_and_goes(shared) if shared else 0.0),
        )

    def learning(self, layout: Layout, mode: str = "colocated") -> Seconds:
        compiled, model = compiles(self.settings, layout.sequence), self.arr.model
        forward_rate = self.rates.reference * self._pace(None, compiled)
        update_rate = self.rates.update * (1 if compiled else measured.EAGER_UPDATE)
        halves, reference = 1 + self.amounts.guided, 0.0
        if self.amounts.reference:
            stored = self.amounts.stored or self.amounts.trained
            pairs = math.ceil(self.amounts.images * stored / layout.data)
            rows = min(self.arr.ref.log_prob_micro_batch_size_per_gpu or self.micro, pairs)
            count = math.ceil(pairs / rows)
            rate = self.rates.reference * self._pace(self.arr.ref.precision, compiled)
            reference = halves * count * self._spread(self._forward(rows, rate, layout), layout, passes=1)
            reference += self._comes_and_goes(layout) + self._reference_comes(layout)
        pairs = self.amounts.pairs(layout)
        rows = min(self.micro, pairs)
        checkpointing = model.enable_gradient_checkpointing
        budget = self.arr.actor.engine.activation_memory_budget
        cost = self.costs.passes.training(rows, checkpointing, compiled, budget)
        chained, flops = self.amounts.chained, cost.forward + cost.backward
        launch = self.rates.launch_forward * (1 + checkpointing) + self.rates.launch_backward
        flops *= self.costs.own_part(layout.sequence)
        one = chained * max(flops / update_rate, self.costs.weights.blocks * launch)
        micros = math.ceil(pairs / rows)
        first = micros * self._spread(one, layout, passes=2 * chained)
        unguided = micros * self._forward(rows, forward_rate, layout) if self.amounts.guided else 0.0
        passes, source = self._passes_before(mode)
        every = math.ceil(pairs * self.amounts.stored / self.amounts.trained / rows)  # not the trained steps alone
        before = every * (1 + self.amounts.guided) * self._spread(self._forward(rows, forward_rate, layout), layout, 1)
        drawn = self.amounts.keeps_uncond and source != "recompute" and not self._stale(mode)
        halves = self.amounts.updates - bool(drawn)  # the first finds the rollout's own, of weights that have not moved
        update = self.amounts.updates * first + passes * before + halves * unguided
        return Seconds(reference=reference, update=update + self._comes_and_goes(layout) + self._state_comes(layout))

    def _comes_and_goes(self, layout: Layout) -> float:
        """Weights that are on the host between stages. What is frozen has its copy there already."""
        if not self.arr.actor.engine.param_offload:
            return 0.0
        weights = self.costs.weights
        return (weights.bytes(layout.parts) + weights.trained_bytes(layout.parts)) / measured.TO_HOST

    def _reference_comes(self, layout: Layout) -> float:
        """A model of your own; or weights as they were at first, which change places with today's, and back again."""
        ref, lora = self.arr.ref, self.arr.model.lora_rank
        if not (ref.param_offload or self.arr.actor.engine.param_offload):
            return 0.0
        if ref.path is not None:
            return whole_model(self.costs, lora) / layout.parts / measured.TO_HOST
        return 0.0 if lora else 4 * self.costs.weights.trained_bytes(layout.parts) / measured.TO_HOST

    def _state_comes(self, layout: Layout) -> float:
        """The optimizer's, for each of its steps, there and back."""
        actor = self.arr.actor
        if not actor.engine.optimizer_offload:
            return 0.0
        state = self.costs.weights.trained_bytes(layout.parts) * optimizer_ratio(actor.optim)
        return 2 * self.amounts.updates * state / measured.TO_HOST

    def _stale(self, mode: str) -> bool:
        """Whether weights learn from what earlier ones drew."""
        return mode not in ("colocated", "separate") and bool(self.settings.trainer.max_staleness)

    def _passes_before(self, mode: str) -> tuple[int, str | None]:
        """Over how many mini-batches old log-probabilities are computed again before the weights move, and where they
        come from: as the trainer and its workers decide it on a GPU."""
        loss = get_diffusion_loss_fn(self.arr.actor.diffusion_loss.loss_mode)
        if not self.amounts.stored or "log_probs" not in loss.required_model_output_keys:
            return 0, None
        trainer = dataclasses.replace(self.settings.trainer, device="cuda")
        alike = same_arithmetic(dataclasses.replace(self.settings, trainer=trainer))
        source = choose_old_log_probs(self.arr.actor.old_log_probs, alike, same_weights=not self._stale(mode)).source
        epochs = self.arr.actor.ppo_epochs
        minis = self.amounts.updates // epochs
        if source == "recompute" or is_on(self.settings.algorithm.rollout_correction):
            return minis, source
        return (minis - (epochs == 1) if source == "train" else 0), source

    @property
    def micro(self) -> int:
        return self.arr.actor.ppo_micro_batch_size_per_gpu

    def _pace(self, precision: str | None, compiled: bool) -> float:
        """Of a forward, to one in full of compiled blocks. What eager blocks lose in 8 bits is not counted."""
        if not compiled:
            return measured.EAGER_FORWARD
        if precision is None:
            return 1.0
        spared = 1 - 1 / self.rates.eight_bits  # with all layers that the architecture names
        return 1 / (1 - spared * self._share_in_8_bits)

    @property
    def _share_in_8_bits(self) -> float:
        """Of the work of the architecture's own list, that of the layers that a run names, by their weights."""
        named, own = (self.costs.eight_bits(modules)[0] for modules in (self.arr.actor.engine.fp8_modules, None))
        return min(1.0, named / own)

    def _forward(self, rows: int, rate: float, layout: Layout | None = None) -> float:
        """One, without a gradient. The host may be slower than the device."""
        flops = self.costs.passes.forward(rows).forward * self.costs.own_part(layout.sequence if layout else 1)
        return max(flops / rate, self.costs.weights.blocks * self.rates.launch_forward)

    def _spread(self, seconds: float, layout: Layout, passes: int) -> float:
        """With what the ranks send each other meanwhile: weights for each pass, and gradients with the last of two.

        Weights and gradients go round among the ranks that share one copy; the same share of several copies' gradients
        is summed by ranks that may be on several machines.
        """
        if not self.sends:
            return seconds
        parts, copies, weights = layout.parts, layout.replicate, self.costs.weights
        in_a_copy = passes * weights.gathered(self.costs.dtype.itemsize) * (parts - 1) / parts
        between_copies = 0.0
        if passes > 1:
            gradients = weights.trained * GRADIENT_BYTES
            in_a_copy += gradients * (parts - 1) / parts
            between_copies = 2 * gradients / parts * (copies - 1) / copies  # there and back, of a ring
        alone = layout.world <= measured.GPUS_A_MACHINE
        together = alone or measured.GPUS_A_MACHINE % parts == 0  # no copy lies on two machines
        return max(seconds, in_a_copy / _link(together) + between_copies / _link(alone))


def _link(inside: bool) -> float:
    return measured.WITHIN_MACHINE if inside else measured.BETWEEN_MACHINES
