"""Memory of each stage on one rank, and what it consists of."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from verl_omni.algorithms.registry import get_diffusion_loss_fn
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.pipelines.model_base import DiffusionModelBase
from verl_omni.trainer.checks.precision import in_8_bits
from verl_omni.trainer.forecast.amounts import Amounts
from verl_omni.trainer.forecast.model import ModelCosts, compiles
from verl_omni.workers.engine.export import FILE_BYTES
from verl_omni.workers.engine.optimizer import optimizer_ratio
from verl_omni.workers.engine.registry import engine_class
from verl_omni.workers.engine.step_in_pieces import PIECE
from verl_omni.workers.layout import Layout
from verl_omni.workers.rollout import engine_class as rollout_engine
from verl_omni.workers.transfer.weights import BUCKET_BYTES

GIB = 2**30
LIBRARIES = 2 * 32 * 2**20  # workspaces of cuBLAS, of the forward's and of the backward's thread
LATENTS_OF_A_PAIR = 4  # before and after the step, the unguided half, and the reference's mean
BESIDE = ("reference and other policies", "models of your own", "VAE", "text encoders")
GATHERED = 2  # blocks at a time: the one that runs, and the next one
FOLD_BELOW = 0.75  # of the memory: the engine folds LoRA where its weights take less


@dataclass(frozen=True)
class Stage:
    name: str
    device: dict[str, float]  # bytes by what they are
    host: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> float:
        return sum(self.device.values())


def passing(costs: ModelCosts) -> float:
    """Bytes of what ranks that share a model gather while its blocks run one after the other."""
    itemsize = costs.dtype.itemsize
    return GATHERED * costs.weights.largest_block(itemsize) + costs.weights.around(itemsize)


def whole_model(costs: ModelCosts, lora_rank: int) -> float:
    """Bytes of a second model in the dtype of the computation, taken to be as large as the trained one."""
    return (costs.weights.numel - (costs.weights.trained if lora_rank else 0)) * costs.dtype.itemsize


class RankMemory:
    """Of one training rank: what it holds all the time, and what each stage adds."""

    def __init__(
        self, costs: ModelCosts, settings: DiffusionTrainerConfig, amounts: Amounts, layout: Layout, memory: float
    ):
        self.costs, self.settings, self.amounts, self.layout, self.memory = costs, settings, amounts, layout, memory
        arr = settings.actor_rollout_ref
        self.actor, self.rollout, self.ref, self.model = arr.actor, arr.rollout, arr.ref, arr.model
        self.servers = not arr.hybrid_engine
        self.weights, self.parts = costs.weights, layout.parts
        self.itemsize = costs.dtype.itemsize

    # ---- what is there -------------------------------------------------------------------------------

    @property
    def held(self) -> dict[str, float]:
        """On the device between stages, all but the weights themselves."""
        trained = self.weights.trained_bytes(self.parts)
        engine, found = self.actor.engine, {}
        if not engine.optimizer_offload:
            found["optimizer state"] = trained * optimizer_ratio(self.actor.optim)
        copies = self.amounts.copies
        as_it_began = self.amounts.reference and self.ref.path is None
        if as_it_began and self.model.lora_rank == 0 and not self.ref.param_offload:
            copies += 1
        if copies and not engine.param_offload:
            found["reference and other policies"] = trained * copies
        if self.amounts.models and not engine.param_offload:
            one = whole_model(self.costs, self.model.lora_rank)
            found["models of your own"] = self.amounts.models * one / self.parts
        if self.amounts.draws and not self.servers:
            found["VAE"] = self.costs.vae_bytes
            if not self.rollout.encoder_offload:
                found["text encoders"] = self.costs.encoder_bytes
        if not engine.sample_offload:
            found["kept samples"] = self.sample_bytes
        found["libraries"] = LIBRARIES
        return found

    @property
    def share(self) -> dict[str, float]:
        name = "weights" if self.parts == 1 else f"weights, a share of {self.parts}"
        return {name: self.weights.bytes(self.parts)}

    @property
    def sample_bytes(self) -> float:
        """Of the samples that this rank draws: latents of each, and each prompt's features once."""
        own = math.ceil(self.amounts.images / self.layout.world)
        prompts = math.ceil(own / self.rollout.n)
        return own * self._latents_of_one * self.costs.latent_bytes + prompts * self.costs.condition_bytes

    @property
    def _latents_of_one(self) -> int:
        stored = self.amounts.stored
        if not stored:
            return 1
        uncond = stored if self.amounts.keeps_uncond else 0
        means = stored * (self.amounts.reference + self.amounts.keeps_means)
        return stored + 1 + uncond + means

    @property
    def folds(self) -> bool:
        """As the engine decides."""
        engine = self.actor.engine
        if self.model.lora_rank == 0 or self.layout.is_spread or self.servers or engine.fold_lora is False:
            return False
        if self.model.base_precision:
            return False
        if engine.fold_lora is None:
            room = self.weights.bytes() + self.weights.adapted < FOLD_BELOW * self.memory
            return room and not engine.param_offload
        return True

    @property
    def spread(self) -> dict[str, float]:
        """What FSDP2 gathers while blocks run one after the other."""
        if not self.layout.is_spread:
            return {}
        trains = engine_class(self.actor.strategy)
        whole = not trains.frees_gathered(trains.settings(self.actor))
        blocks = self.weights.gathered(self.itemsize) if whole else passing(self.costs)
        return {"gathered blocks": blocks}

    # ---- the stages ----------------------------------------------------------------------------------

    def stages(self) -> Iterator[Stage]:
        yield Stage("load", self.share | self._copies_at_start | {"one tensor on its way": self.weights.largest})
        if self.amounts.draws and not self.servers:
            yield from self.drawing()
        if self.amounts.reference:
            rows = min(self.ref.log_prob_micro_batch_size_per_gpu or self.micro, self.amounts.pairs(self.layout))
            forward = {"forward": self.costs.passes.forward(rows).extra * self.costs.own_part(self.layout.sequence)}
            gathered = {"whole model, gathered": self.weights.gathered(self.itemsize)}  # to be quantised
            there = gathered if self.ref.precision and self.layout.is_spread else self.spread
            yield Stage("reference", self.share | self.held | there | self.copies(self.ref.precision, False) | forward)
        yield self.update()
        if self.servers:
            bucket = {"one tensor, whole": self.weights.largest}
            sent = self.weights.bytes(1, lambda held: held.trained)
            yield Stage("hand-over", self.share | self.held | bucket, {"weights in Ray's object store": sent})
        yield self.checkpoint()

    @property
    def _copies_at_start(self) -> dict[str, float]:
        return {k: v for k, v in self.held.items() if k in BESIDE}

    @property
    def rows_drawn(self) -> int:
        """Rows of one forward of the rollout."""
        drawing = self.layout.data if self.rollout.share_samples else self.layout.world
        requests = min(self.rollout.max_num_seqs, math.ceil(self.amounts.drawn / drawing))
        return requests * (2 if self.amounts.guided and self.rollout.cfg_in_one_forward else 1)

    @property
    def for_rollout(self) -> dict[str, float]:
        """The whole model, where a rank holds a share: every rank draws samples of its own. Or what passes by of it."""
        if self.layout.is_spread and self.rollout.gather == "blocks":
            return {"gathered blocks": passing(self.costs)}
        if self.layout.is_spread:
            return {"whole model, gathered": self.weights.gathered(self.itemsize)}
        if rollout_engine(self.rollout.name).has_a_copy:
            return {f"{self.rollout.name}'s copy of the model": self.weights.numel * self.itemsize}
        return {}

    def copies(self, precision: str | None, drawing: bool = True) -> dict[str, float]:
        """Of weights, for passes in full or in 8 bits."""
        folds = drawing and self.folds and not rollout_engine(self.rollout.name).has_a_copy
        if precision is None:
            return {"LoRA folded into a copy": self.weights.adapted} if folds else {}
        in_8_bits, others = self.costs.eight_bits(self.actor.engine.fp8_modules)
        return {"8-bit copies": in_8_bits} | ({"LoRA folded into a copy": others} if folds else {})

    def drawing(self) -> Iterator[Stage]:
        # One after the other: the pool, what is chosen, and validation, which draws in full.
        times = {self.rollout.pool.precision or self.rollout.precision, self.rollout.precision}
        times |= {None} if self.amounts.validates else set()
        copies = max(map(self.copies, times), key=lambda found: sum(found.values()))
        there = self.share | self.held | self.for_rollout | copies
        forward = self.costs.passes.forward(self.rows_drawn).extra
        sequence = self.layout.sequence if self.rollout.share_samples else 1
        yield Stage("rollout", there | {"forward": forward * self.costs.own_part(sequence)})
        rows = self.amounts.decoded_at_once(self.rollout.max_num_seqs)
        yield Stage("decode", there | {"decoder": self.costs.decode(rows, self.rollout.vae_tiling).extra})

    @property
    def micro(self) -> int:
        return self.actor.ppo_micro_batch_size_per_gpu

    def update(self) -> Stage:
        rows = min(self.micro, self.amounts.pairs(self.layout))
        compiled = compiles(self.settings, self.layout.sequence)
        budget = self.actor.engine.activation_memory_budget
        cost = self.costs.passes.training(rows, self.model.enable_gradient_checkpointing, compiled, budget)
        own = self.costs.own_part(self.layout.sequence)
        activations, working = cost.kept * own * self.amounts.chained, cost.extra * own
        gradients = self.weights.trained_bytes(self.parts)
        taken = rows * (LATENTS_OF_A_PAIR * self.costs.latent_bytes + self.costs.condition_bytes)
        state, piece, host = gradients * optimizer_ratio(self.actor.optim), 0.0, {}
        if self.actor.engine.optimizer_offload:
            host = {"optimizer state": state}
            state, piece = 0.0, min(state, PIECE * optimizer_ratio(self.actor.optim))
        device = self.share | self.held | {"optimizer state": state} | self.spread | {"a micro-batch": taken}
        if self.layout.is_spread:
            device["gradients on their way"] = self._reduced
        # With several micro-batches the gradients lie there while the next activations do.
        beside = gradients if self.amounts.pairs(self.layout) > rows else 0.0
        if beside + activations + working > gradients + piece:
            device |= {"activations": activations, "a block at work": working, "gradients": beside}
        else:
            device |= {"gradients": gradients, "a piece of the optimizer's state": piece}
        return Stage("update", {k: v for k, v in device.items() if v}, host)

    @property
    def _reduced(self) -> float:
        """A block's gradients before they are shared out, whole: as they were computed, and in float32."""
        if self.model.lora_rank:  # of all blocks: they wait for the last micro-batch
            return self.weights.trained * 4
        return self.weights.largest_block(self.itemsize, trained=True) + self.weights.largest_block(4, trained=True)

    def checkpoint(self) -> Stage:
        contents, behind = self.actor.checkpoint.save_contents, self.actor.checkpoint.async_save
        trained, own, host = self.weights.trained_bytes(), self.weights.trained_bytes(self.parts), {}
        if "export" in contents and self.model.lora_rank:
            host["the adapter, whole, on the first rank"] = trained
        elif "export" in contents:
            files = math.ceil(trained / FILE_BYTES)
            held = math.ceil(files / self.layout.world) if behind else 1
            host["exported files of a rank"] = min(trained, held * FILE_BYTES)
        if behind:
            copied = own * (1 + self.amounts.copies) if "model" in contents else 0
            copied += own * optimizer_ratio(self.actor.optim) if "optimizer" in contents else 0
            host["a rank's copy of its state (async_save)"] = copied
        device = self.share | self.held
        if self.layout.is_spread and "export" in contents:
            device = device | {"one tensor, whole": self.weights.largest}
        return Stage("checkpoint", device, host)

    def checkpoint_bytes(self) -> float:
        """On disk, of all ranks together."""
        contents, trained = self.actor.checkpoint.save_contents, self.weights.trained_bytes()
        found = trained * (1 + self.amounts.copies) if "model" in contents else 0
        found += trained * optimizer_ratio(self.actor.optim) if "optimizer" in contents else 0
        return found + (trained if "export" in contents else 0)


def not_counted(settings: DiffusionTrainerConfig) -> list[str]:
    """What these settings ask for, and nothing here knows the memory or the seconds of."""
    arr = settings.actor_rollout_ref
    writes_tokens = DiffusionModelBase.get_class(arr.model).brings("drawn_conditions")
    found = {
        "the rewriter": arr.rewriter.path is not None,
        "the tokens that the model writes before it draws": writes_tokens and arr.rewriter.path is None,
        "the seconds in which weights are made of those in 8 bits": arr.model.base_precision is not None,
        "the forwards of a teacher": arr.actor.teacher.path is not None,
        "the gradient of the reward in an update: the decoder's activations and a reward's model": (
            "predicted_reward" in get_diffusion_loss_fn(arr.actor.diffusion_loss.loss_mode).required_model_output_keys
        ),
        "what 8 bits cost where blocks are not compiled": bool(in_8_bits(settings)) and not compiles(settings),
        "the seconds of what is written while training goes on": arr.actor.checkpoint.async_save,
        "the seconds that weights take to the rollout servers": settings.trainer.mode != "colocated",
        "the seconds in which text encoders and samples go to the host's memory and back": (
            arr.rollout.encoder_offload or arr.actor.engine.sample_offload
        ),
    }
    engine = engine_class(arr.actor.strategy).not_counted
    return [what for what, asked in found.items() if asked] + ([engine] if engine else [])


class ServerMemory:
    """Of one rollout server."""

    def __init__(self, costs: ModelCosts, settings: DiffusionTrainerConfig, amounts: Amounts, servers: int):
        self.costs, self.rollout = costs, settings.actor_rollout_ref.rollout
        self.modules = settings.actor_rollout_ref.actor.engine.fp8_modules
        self.amounts, self.servers = amounts, servers

    def stages(self) -> Iterator[Stage]:
        held = {
            "weights": self.costs.weights.bytes(),
            "VAE": self.costs.vae_bytes,
            "text encoders": 0 if self.rollout.encoder_offload else self.costs.encoder_bytes,
            "libraries": LIBRARIES,
        }
        if self.rollout.precision or self.rollout.pool.precision:
            held["8-bit copies"] = self.costs.eight_bits(self.modules)[0]
        requests = min(self.rollout.max_num_seqs, math.ceil(self.amounts.drawn / self.servers))
        rows = requests * (2 if self.amounts.guided and self.rollout.cfg_in_one_forward else 1)
        yield Stage("server: rollout", held | {"forward": self.costs.passes.forward(rows).extra})
        decoded = self.amounts.decoded_at_once(self.rollout.max_num_seqs)
        yield Stage("server: decode", held | {"decoder": self.costs.decode(decoded, self.rollout.vae_tiling).extra})
        yield Stage("server: weights arrive", held, {"a bucket": BUCKET_BYTES})


class TeacherMemory:
    """Of one device that holds teachers and nothing else."""

    def __init__(self, costs: ModelCosts, settings: DiffusionTrainerConfig, amounts: Amounts, micro: int):
        self.costs, self.arr, self.amounts, self.micro = costs, settings.actor_rollout_ref, amounts, micro
        self.ranks = self.arr.actor.teacher.ranks

    def stages(self) -> Iterator[Stage]:
        whole, actor = whole_model(self.costs, self.arr.model.lora_rank), self.arr.actor
        trains = engine_class(actor.strategy)
        gathered = passing(self.costs) if trains.frees_gathered(trains.settings(actor)) else whole
        pairs = math.ceil(self.amounts.images * (self.amounts.stored or self.amounts.trained) / self.ranks)
        rows = min(self.arr.ref.log_prob_micro_batch_size_per_gpu or self.micro, pairs)
        device = {
            "weights": self.amounts.teachers * whole / self.ranks,
            "gathered blocks": gathered if self.ranks > 1 else 0.0,
            "forward": self.costs.passes.forward(rows).extra,
            "libraries": LIBRARIES,
        }
        yield Stage("teacher", {name: size for name, size in device.items() if size})
