"""What a plan advises is what `train` takes, and what the engine does with it."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from composed import composed
from omegaconf import OmegaConf
from refusals import prepared

from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.perf.rates import EAGER_FORWARD, EAGER_UPDATE, rates
from verl_omni.trainer.forecast.amounts import amounts
from verl_omni.trainer.forecast.knobs import changes, helps
from verl_omni.trainer.forecast.model import ModelCosts
from verl_omni.trainer.forecast.overrides import overrides
from verl_omni.trainer.forecast.passes import Pass
from verl_omni.trainer.forecast.seconds import Seconds, StepTime
from verl_omni.trainer.forecast.stages import Stage
from verl_omni.trainer.forecast.ways import Card, Way, Ways
from verl_omni.trainer.placement import Room, all_wanted, plan
from verl_omni.workers.engine.registry import layout_of
from verl_omni.workers.layout import Layout

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ULYSSES = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
BATCH = ("data.train_batch_size=2", f"{ACTOR}.ppo_mini_batch_size=2", f"{ROLLOUT}.n=4")
FOUR = (*BATCH, "trainer.n_gpus_per_node=4")
SHARED, TOGETHER, BLOCKS = f"{ULYSSES}=2", f"{ROLLOUT}.share_samples=true", f"{ROLLOUT}.gather=blocks"
SERVED = (*BATCH, "trainer.n_gpus_per_node=2")
ENGINE = f"{ACTOR}.engine"
BUDGET = f"{ENGINE}.activation_memory_budget"


def settings_of(*given: str) -> DiffusionTrainerConfig:
    return OmegaConf.to_object(prepared(*given))


class Listed(Ways):
    """The ways, of which nothing is measured."""

    def way(self, layout: Layout, servers: int = 0, mode: str = "colocated", settings=None) -> Way:
        return Way(mode, layout, servers, (Stage("load", {}),), Seconds(), Seconds(), True, 1)


@pytest.mark.parametrize(
    "given",
    [
        (*FOUR, SHARED, TOGETHER, f"{ACTOR}.fsdp_config.fsdp_size=2"),
        pytest.param((*FOUR, BLOCKS, f"{ENGINE}.compile_ahead=true"), marks=pytest.mark.slow),
        pytest.param((*FOUR, f"{ENGINE}.activation_memory_budget=0.5"), marks=pytest.mark.slow),
        pytest.param(
            (*FOUR, "actor_rollout_ref.model.lora_rank=4", f"{ENGINE}.fold_lora=true"), marks=pytest.mark.slow
        ),
        pytest.param(
            (*SERVED, "actor_rollout_ref.hybrid_engine=false", "rollout.n_gpus_per_node=2"), marks=pytest.mark.slow
        ),
        (*SERVED, "trainer.mode=fully_async", f"{ROLLOUT}.n_gpus_per_node=2", "trainer.stale_groups=keep"),
    ],
)
def test_train_takes_every_way_that_is_listed(given):
    settings = settings_of(*given)
    found = Listed(settings, (9, 9), Card(rates("h200", None), 1.0)).all(4)
    assert {(way.layout.sequence, way.servers > 0) for way in found} == {(1, False), (2, False), (1, True), (2, True)}
    for way in found:
        taken = settings_of(*given, *overrides(way, settings))
        rollout, trainer = taken.actor_rollout_ref.rollout, taken.trainer
        servers = 0 if trainer.mode == "colocated" else rollout.n_gpus_per_node * (rollout.nnodes or 1)
        assert (layout_of(taken), trainer.mode, servers) == (way.layout, way.mode, way.servers)


SIXTEEN = ("trainer.n_gpus_per_node=8", "trainer.nnodes=2")


def test_two_machines_have_the_gpus_of_every_way_that_is_listed():
    """By the count that a run makes of its nodes before it starts. Twelve GPUs are six of each, and no machine has
    twelve."""
    settings = settings_of("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16", f"{ROLLOUT}.n=9", *SIXTEEN)
    found = Listed(settings, (9, 9), Card(rates("h200", None), 1.0)).all(16)
    nodes = {name: Room.of({"GPU": 8, "CPU": 64}) for name in ("first", "second")}
    typed = {}
    for way in found:
        given = tuple(one for one in overrides(way, settings) if "n_gpus" in one or "nnodes" in one)
        if typed.setdefault(way.layout.world, given) and way.layout.sequence == way.layout.shard == 1:
            apart = f"actor_rollout_ref.hybrid_engine={str(not way.servers).lower()}"
            wanted = all_wanted(composed("trainer.device=cuda", apart, *given))
            assert sum(sum(one.on_nodes) for one in wanted) == 16 and plan(wanted, nodes), given
        assert typed[way.layout.world] == given
    assert typed[12] == ("trainer.n_gpus_per_node=6", "trainer.nnodes=2", f"{ROLLOUT}.n_gpus_per_node=2",
                         f"{ROLLOUT}.nnodes=2")  # fmt: skip
    assert sorted(typed) == [2, 4, 6, 8, 12, 16]


SAVED = {"gather": ("blocks", 30), "share_samples": (True, 40), "encoder_offload": (True, 20)}


def peak_of(settings: DiffusionTrainerConfig) -> float:
    rollout = settings.actor_rollout_ref.rollout
    return 100 - sum(saved for name, (value, saved) in SAVED.items() if getattr(rollout, name) == value)


@pytest.mark.parametrize(
    ("memory", "enough"), [(52, {"gather", "encoder_offload"}), (41, {"share_samples", "encoder_offload"}), (11, set())]
)
def test_what_excludes_each_other_is_not_advised_together(memory, enough):
    """Block by block, or several to a sample: each where the other is off."""
    settings = settings_of(*FOUR, SHARED)

    def asked(layout: Layout, settings: DiffusionTrainerConfig = settings) -> SimpleNamespace:
        return SimpleNamespace(stages=[Stage("rollout", {"all": peak_of(settings)})])

    card = SimpleNamespace(holds=lambda peak: peak < memory)
    found = helps(SimpleNamespace(settings=settings, asked=asked, card=card), layout_of(settings), "rollout")
    assert [{name.rpartition(".")[2] for name in help.change} for help in found if help.fits] == [enough] * bool(enough)
    assert {name.rpartition(".")[2] for help in found for name in help.change} == SAVED.keys()
    for help in found:
        prepared(*FOUR, SHARED, *help.typed.split())
    for given, other in ((BLOCKS, "share_samples"), (TOGETHER, "gather")):
        tried = changes(settings_of(*FOUR, SHARED, given), "rollout")
        assert f"{ROLLOUT}.{other}" not in {name for change in tried for name in change}


def test_a_budget_of_activations_and_checkpointing_exclude_each_other():
    """Each is tried where the other is off, and together with the rest that which is enough."""
    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing"
    off = {checkpointing: True, BUDGET: 1.0}
    for given, tried in (
        ((), [{BUDGET: 0.5}]), ((f"{BUDGET}=0.7",), [{BUDGET: 0.5}, off]), ((f"{BUDGET}=0.5",), [off]),
        ((f"{checkpointing}=true",), []),
    ):  # fmt: skip
        assert [change for change in changes(settings_of(*given), "update") if BUDGET in change] == tried

    def asked(layout: Layout, settings: DiffusionTrainerConfig) -> SimpleNamespace:
        arr = settings.actor_rollout_ref
        spared = 60 if arr.model.enable_gradient_checkpointing else 80 * (1 - arr.actor.engine.activation_memory_budget)
        return SimpleNamespace(stages=[Stage("update", {"all": 100 - spared - 20 * bool(arr.rollout.encoder_offload)})])

    for memory, enough in ((65, {BUDGET}), (21, {checkpointing, f"{ROLLOUT}.encoder_offload"})):
        settings = settings_of()
        card = SimpleNamespace(holds=lambda peak, memory=memory: peak < memory)
        ways = SimpleNamespace(settings=settings, asked=lambda layout, s=settings: asked(layout, s), card=card)
        found = [help for help in helps(ways, layout_of(settings), "update") if help.fits]
        assert set(found[0].change) == enough
        prepared(*found[0].typed.split())


@pytest.mark.parametrize("drawn", [(), (TOGETHER,)])
def test_ranks_that_share_samples_draw_without_compiled_blocks(drawn):
    """As the engine has it: what it does not compile for training is not compiled for drawing."""
    settings = settings_of(*FOUR, SHARED, *drawn)
    passes = SimpleNamespace(forward=lambda rows: Pass(forward=1e15 * rows))
    costs = SimpleNamespace(
        passes=passes, decode=lambda *given: Pass(), weights=SimpleNamespace(blocks=0), own_part=lambda n: 1 / n
    )
    one_a_row = dataclasses.replace(amounts(settings), images=4)
    time = StepTime(costs, settings, one_a_row, rates("h200", None))
    alone, shared = (time.drawing(4, layout).denoise for layout in (Layout(shard=4), Layout(shard=2, sequence=2)))
    assert shared == pytest.approx(alone / EAGER_FORWARD)
    assert time.drawing(4).denoise == alone  # rollout servers share nothing


def test_tokens_that_are_not_shared_are_whole_on_each_rank():
    """Of a video with sound, where 60 of 80 tokens are the video's."""
    costs = object.__new__(ModelCosts)
    costs.config = None
    costs.adapter = SimpleNamespace(shared_tokens=lambda config: 60, tokens=lambda config: 80)
    assert [costs.own_part(ranks) for ranks in (1, 2, 4)] == [1, 50 / 80, 35 / 80]
    costs.adapter.shared_tokens = costs.adapter.tokens
    assert costs.own_part(4) == 1 / 4


@pytest.mark.parametrize(
    ("layout", "passes", "gigabytes"),  # of 40 GB of weights and 80 of gradients: (on NVLink, on the network)
    [
        (Layout(1, 8), 2, (2 * 35 + 70, 0)),
        (Layout(1, 16), 2, (0, 2 * 37.5 + 75)),
        (Layout(2, 8), 2, (2 * 35 + 70, 10)),  # of its 10 GB of gradients a rank sends half twice
        (Layout(2, 8), 1, (35, 0)),
        (Layout(2, 4, 2), 1, (35, 0)),
        (Layout(2, 2), 2, (2 * 20 + 40 + 40, 0)),
        (Layout(2, 12), 1, (0, 40 * 11 / 12)),  # one of two copies lies on two machines
        (Layout(16, 1), 2, (0, 150)),
        (Layout(1, 1), 2, (0, 0)),
    ],
)
def test_weights_stay_on_the_machine_where_each_has_a_copy(layout, passes, gigabytes):
    """On machines of eight GPUs, of which each sends 450 GB/s to the others there and 50 beyond."""
    time = object.__new__(StepTime)
    weights = SimpleNamespace(gathered=lambda itemsize: 20e9 * itemsize, trained=20e9)
    time.costs, time.sends = SimpleNamespace(weights=weights, dtype=SimpleNamespace(itemsize=2)), True
    inside, outside = gigabytes
    assert time._spread(0.0, layout, passes) == pytest.approx(inside / 450 + outside / 50)
    assert time._spread(9.0, layout, passes) == 9.0  # all of it while blocks compute


def learned(*given: str, mode: str = "colocated", **more: object) -> float:
    """Seconds of an update, of which a forward without a gradient takes 1 and one with it 4."""
    settings = settings_of(*given)
    rate = rates("h200", None)
    passes = SimpleNamespace(
        forward=lambda rows: Pass(forward=rate.reference), training=lambda *how: Pass(forward=4 * rate.update)
    )
    weights = SimpleNamespace(blocks=0, gathered=lambda itemsize: 0, trained=0)
    costs = SimpleNamespace(passes=passes, weights=weights, dtype=torch.bfloat16, own_part=lambda ranks: 1.0)
    one = dataclasses.replace(amounts(settings), guided=True, reference=False, mini_images=1, stored=1, trained=1)
    return StepTime(costs, settings, dataclasses.replace(one, **more), rate).learning(Layout(), mode).learning


@pytest.mark.parametrize(
    ("offloaded", "trained", "reference", "gigabytes"),
    [
        # of 10 GB of weights: drawn with, looked at by the reference, and learned with
        ([], 10, True, 0),
        (["param"], 10, True, 3 * (10 + 10) + 4 * 10),  # today's leave for the first, and come back
        (["param"], 1, True, 3 * (10 + 1)),  # LoRA's reference is the model without it
        (["param"], 10, False, 2 * (10 + 10)),
        (["optimizer"], 10, False, 2 * 2 * (2 * 10)),  # two steps, AdamW's two numbers a weight
        (["ref"], 10, True, 4 * 10),
    ],
)
def test_what_is_offloaded_comes_and_goes(offloaded, trained, reference, gigabytes):
    """At 25 GB/s, shared by two ranks of a copy."""
    where = {"ref": "actor_rollout_ref.ref.param_offload"}
    given = [f"{where.get(what, f'{ACTOR}.engine.{what}_offload')}=true" for what in offloaded]
    lora = "actor_rollout_ref.model.lora_rank=8" if trained < 10 else "actor_rollout_ref.model.lora_rank=0"

    def seconds(*given: str) -> float:
        settings = settings_of(lora, *given)
        passes = SimpleNamespace(forward=lambda rows: Pass(), training=lambda *how: Pass())
        weights = SimpleNamespace(
            blocks=0, gathered=lambda itemsize: 0, trained=0,
            bytes=lambda parts: 10e9 / parts, trained_bytes=lambda parts: trained * 1e9 / parts,
        )  # fmt: skip
        costs = SimpleNamespace(
            passes=passes, weights=weights, dtype=torch.bfloat16, own_part=lambda ranks: 1.0,
            decode=lambda *how: Pass(),
        )  # fmt: skip
        asked = dataclasses.replace(amounts(settings), reference=reference, updates=2)
        time = StepTime(costs, settings, asked, rates("h200", None))
        layout = Layout(shard=2)
        return time.drawing(2, layout).drawing + time.learning(layout).learning

    assert seconds(*given) - seconds() == pytest.approx(gigabytes / 2 / 25)


@pytest.fixture
def exact_products():
    """Something else in this process may have allowed TF32."""
    products = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "ieee"
    yield
    products.fp32_precision = before


AHEAD = (*SERVED, "trainer.mode=one_step_off", f"{ROLLOUT}.n_gpus_per_node=2")
EXACT = (f"{ENGINE}.dtype=float32", f"{ENGINE}.use_torch_compile=false")


@pytest.mark.parametrize(
    ("given", "mode", "expected"),
    [
        ((), "colocated", 4),  # the unconditional half is the rollout's
        ((), "separate", 4),
        ((f"{ACTOR}.reuse_uncond=false",), "colocated", 4 + 1),
        ((f"{ACTOR}.old_log_probs=recompute",), "colocated", 2 + 4 + 1),  # both halves before, one in the update
        (AHEAD, "one_step_off", 2 + 4 + 1),
        ((*AHEAD, "trainer.max_staleness=0"), "one_step_off", 4),
        ((f"{ROLLOUT}.precision=fp8",), "colocated", 4),
        ((f"{ROLLOUT}.precision=fp8", f"{ACTOR}.use_kl_loss=true"), "colocated", 4 + 1),  # its means are in full
        ((*AHEAD, *EXACT), "one_step_off", 4 / EAGER_UPDATE + 1 / EAGER_FORWARD),  # ratios to the policy that drew
    ],
)
def test_what_learns_from_earlier_weights_computes_more(given, mode, expected, exact_products):
    """On a GPU log-probabilities are computed again, and the rollout's unconditional half is not used."""
    assert learned(*BATCH, *given, mode=mode) == pytest.approx(expected)


def test_8_bits_draw_as_fast_as_was_measured():
    fp8, pool = f"{ROLLOUT}.precision=fp8", (f"{ROLLOUT}.pool.size=8", f"{ROLLOUT}.pool.precision=fp8")
    costs = SimpleNamespace(
        passes=SimpleNamespace(forward=lambda rows: Pass(forward=1e15 * rows)), decode=lambda *given: Pass(),
        weights=SimpleNamespace(blocks=0), own_part=lambda n: 1.0,
        eight_bits=lambda modules: (100 if modules is None else 30 * len(modules), 0),
    )  # fmt: skip
    quick = rates("h200", None)

    def seconds(*given: str) -> float:
        settings = settings_of(*BATCH, *given)
        return StepTime(costs, settings, amounts(settings), quick).drawing(1).denoise

    assert quick.eight_bits > 1
    assert seconds(fp8) == pytest.approx(seconds() / quick.eight_bits)
    assert seconds(fp8, f"{ENGINE}.use_torch_compile=false") == seconds(f"{ENGINE}.use_torch_compile=false")
    some = seconds(fp8, f"{ENGINE}.fp8_modules=[to_q,to_k]")  # 60 % of what the architecture has in 8 bits
    assert some == pytest.approx(seconds() * (0.4 + 0.6 / quick.eight_bits))
    assert seconds(fp8, f"{ENGINE}.fp8_modules=[a,b,c,d]") == seconds(fp8)
    assert seconds(*pool) == pytest.approx(seconds() * (1 + 8 / 4 / quick.eight_bits))  # 4 are drawn again
    fewer = (pool[0], f"{ROLLOUT}.pool.num_inference_steps=2")
    assert seconds(fp8, *fewer) == pytest.approx(seconds(*fewer) / quick.eight_bits)  # as what is chosen


def test_later_optimizer_steps_compare_with_what_was_before_them():
    """Of four mini-batches three find weights that have moved, of two twice learned all but the first do."""
    assert learned(*BATCH, updates=4) == pytest.approx(4 * 4 + 3 * (2 + 1))
    assert learned(*BATCH, f"{ACTOR}.ppo_epochs=2", updates=4) == pytest.approx(4 * 4 + 2 * 2 + 3)
