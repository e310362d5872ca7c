"""From the settings of a run to what it will need, stage by stage, and the best way to use so many GPUs."""

import dataclasses
from dataclasses import dataclass

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_omni.perf.rates import MEMORY, NO_8_BITS, rates
from verl_omni.pipelines.causal_lm import CAUSAL_LM
from verl_omni.trainer.checks.precision import in_8_bits
from verl_omni.trainer.checks.preparation import prepare_config
from verl_omni.trainer.forecast.knobs import Help, helps
from verl_omni.trainer.forecast.model import ModelCosts
from verl_omni.trainer.forecast.prompts import prompt_tokens
from verl_omni.trainer.forecast.stages import GIB
from verl_omni.trainer.forecast.ways import Card, Way, Ways
from verl_omni.workers.engine.registry import layout_of
from verl_omni.workers.layout import Layout

GPUS_A_NODE = 8


@dataclass(frozen=True)
class Forecast:
    ways: Ways
    layout: Layout
    asked: Way
    gpus: int
    card: Card
    gpu: str

    def helps(self) -> dict[str, list[Help]]:
        """For each stage that does not fit."""
        over = [stage.name for stage in self.asked.stages if not self.card.holds(stage.peak)]
        return {name: helps(self.ways, self.layout, name) for name in over}

    @property
    def teaching(self) -> int:
        return self.ways.settings.actor_rollout_ref.actor.teacher.ranks

    def all(self) -> list[Way]:
        return self.ways.all(self.gpus - self.teaching)


def forecast(
    config: DictConfig,
    gpus: int | None = None,
    memory: float | None = None,
    gpu: str = "h200",
    known: dict[tuple, ModelCosts] | None = None,
    remember: bool = False,
) -> Forecast:
    """`config` as the command composed it. Weights are not looked at: a folder of configs will do.

    `known` holds what was measured of models, for further forecasts; `remember` keeps it on disk, for other processes.
    """
    card_rates = rates(gpu, None)  # refuses a name that nobody knows before anything takes time
    with open_dict(config):
        config.actor_rollout_ref.model.load_format = "dummy"
        if gpus is not None:
            share_out(config, gpus)
    config = prepare_config(config)
    settings = OmegaConf.to_object(config)
    if settings.actor_rollout_ref.model.architecture == CAUSAL_LM:
        raise ValueError("`plan` reckons with a generator, and actor_rollout_ref.model.path names none")
    if gpu.lower() in NO_8_BITS and (asked := in_8_bits(settings)):
        raise ValueError(f"--gpu={gpu} cannot compute in 8 bits: leave {' and '.join(asked)} out")
    layout = layout_of(settings)
    card = Card(card_rates, (memory or MEMORY[gpu.lower()]) * GIB)
    ways = Ways(settings, prompt_tokens(config, settings), card, known, remember)
    timed = rates(gpu, settings.actor_rollout_ref.model.architecture, ways.costs(settings).weights.numel)
    ways.card = card = dataclasses.replace(card, rates=timed)
    asked = ways.asked(layout)
    gpus = layout.world + asked.servers + settings.actor_rollout_ref.actor.teacher.ranks
    return Forecast(ways, layout, asked, gpus, card, gpu.upper())


def share_out(config: DictConfig, gpus: int) -> None:
    """`--gpus` of them train, but for those that the settings give to rollout servers and to teachers."""
    rollout, teacher = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.teacher
    servers = 0
    if config.trainer.mode != "colocated" or not config.actor_rollout_ref.hybrid_engine:
        servers = (rollout.n_gpus_per_node or config.rollout.n_gpus_per_node or 1) * (
            rollout.nnodes or config.rollout.nnodes or 1
        )
    teaching = (teacher.n_gpus_per_node or 0) * (teacher.nnodes or 1)
    training = gpus - servers - teaching
    if training < 1:
        others = " and ".join(f"{n} of them {do}" for n, do in ((servers, "draw"), (teaching, "hold teachers")) if n)
        raise ValueError(f"--gpus={gpus}: {others}, and none is left to train")
    nodes = 1 if training <= GPUS_A_NODE else training // GPUS_A_NODE
    if training % nodes or training // nodes > GPUS_A_NODE:
        raise ValueError(f"--gpus={gpus}: expected up to {GPUS_A_NODE} that train, or a multiple of it")
    config.trainer.nnodes, config.trainer.n_gpus_per_node = nodes, training // nodes
