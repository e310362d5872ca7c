"""A forecast as text."""

from collections.abc import Iterator

from verl_omni.config.actor import AUTO
from verl_omni.perf.rates import USABLE
from verl_omni.trainer.forecast.forecast import Forecast
from verl_omni.trainer.forecast.overrides import overrides
from verl_omni.trainer.forecast.stages import GIB, RankMemory, Stage, not_counted
from verl_omni.trainer.forecast.ways import Way
from verl_omni.workers.engine.registry import engine_class

SHOWN = 8  # ways
SMALL = 0.02  # of a peak: parts below are put together
TIMES = {  # of a stage
    "rollout": ("denoise", "rollout_overhead"),
    "decode": ("decode",),
    "reference": ("reference",),
    "update": ("update",),
}


def text(forecast: Forecast) -> str:
    return "\n".join(lines(forecast))


def lines(forecast: Forecast) -> Iterator[str]:
    costs, way = forecast.ways.costs(forecast.ways.settings), forecast.asked
    weights, amounts, model = costs.weights, forecast.ways.amounts, forecast.ways.settings.actor_rollout_ref.model
    trained = "all" if weights.trained == weights.numel else f"{weights.trained / 1e6:,.1f} million"
    yield f"{model.architecture}: {weights.numel / 1e9:.2f} billion parameters, {trained} of them trained."
    size = model.pipeline
    frames = f"{size.num_frames} frames of " if size.num_frames else ""
    drawn = f"{amounts.images} images ({frames}{size.height} x {size.width}, {amounts.steps} steps)"
    yield f"A step: {drawn}, {amounts.trained} trained steps each, {amounts.updates} optimizer steps."
    teach = f", {forecast.teaching} hold teachers" if forecast.teaching else ""
    yield f"{forecast.gpus} {forecast.gpu} of {forecast.card.memory / GIB:.0f} GiB: {describe(way)}{teach}."
    if forecast.ways.settings.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu == AUTO:
        yield f"Micro-batch: up to {way.micro_batch} pairs fit, of which the run takes the fastest (auto)."
    yield ""
    yield "| stage | peak, GiB | fits | s | consists of |"
    yield "|---|---|---|---|---|"
    for stage in way.stages:
        timed = TIMES.get(stage.name.removeprefix("server: "), ())
        time = sum(getattr(way.drawing, name) + getattr(way.learning, name) for name in timed)
        fits = "yes" if forecast.card.holds(stage.peak) else "**no**"
        yield f"| {stage.name} | {stage.peak / GIB:.1f} | {fits} | {f'{time:.2f}' if time else ''} | {parts(stage)} |"
    yield ""
    yield f"About {way.seconds:.1f} s a step, {amounts.images / way.seconds:.2f} images/s, without the rewards."
    yield f"Rates: {forecast.card.rates.where}."
    yield from within_budget(forecast)
    if missing := not_counted(forecast.ways.settings):
        yield f"Not counted: {'; '.join(missing)}."
    rank = RankMemory(costs, forecast.ways.settings, amounts, forecast.layout, forecast.card.memory)
    yield f"A checkpoint: {rank.checkpoint_bytes() / GIB:.1f} GiB on disk."
    for stage in way.stages:
        for what, size in stage.host.items():
            yield f"In the host's memory ({stage.name}): {what}: {size / GIB:.1f} GiB."
    for name, found in forecast.helps().items():
        yield ""
        yield f"The {name} does not fit into {USABLE:.0%} of {forecast.card.memory / GIB:.0f} GiB. What helps there:"
        for help in found:
            yield f"  {help.peak / GIB:6.1f} GiB{'  fits' if help.fits else '      '}  {help.typed}"
        if not found:
            more = "actor_rollout_ref.actor.teacher.n_gpus_per_node" if name == "teacher" else "--gpus"
            yield f"  no setting: share the model between more GPUs ({more})"
    actor = forecast.ways.settings.actor_rollout_ref.actor
    has_fsdp_settings = engine_class(actor.strategy).settings(actor) is actor.fsdp_config  # others have their own
    if forecast.gpus - forecast.teaching > 1 and has_fsdp_settings:
        yield ""
        yield from other_ways(forecast)


def within_budget(forecast: Forecast) -> Iterator[str]:
    """What a memory budget spares an update, and what it costs."""
    settings, way = forecast.ways.settings, forecast.asked
    budget = settings.actor_rollout_ref.actor.engine.activation_memory_budget
    if budget == 1:
        return
    passes, rows = forecast.ways.costs(settings).passes, min(way.micro_batch, forecast.ways.amounts.pairs(way.layout))
    without, within = passes.parted(rows, 1.0, budget)
    again = (within.backward - without.backward) / without.forward
    yield (
        f"activation_memory_budget={budget:g}: {within.kept / GIB:.1f} GiB between forward and backward in place of "
        f"{without.kept / GIB:.1f}, and {again:.0%} of a forward's arithmetic again."
    )


def describe(way: Way) -> str:
    layout, said = way.layout, []
    if layout.world == 1:
        said.append("one trains")
    else:
        said.append(f"{layout.world} train")
        said.append(f"{layout.replicate} copies of the weights" if layout.replicate > 1 else "one copy of the weights")
        said.append(f"each cut into {layout.parts}")
        if layout.sequence > 1:
            said.append(f"{layout.sequence} share each sample")
    said.append(f"{way.servers} draw ({way.mode})" if way.servers else "all draw")
    return ", ".join(said)


def parts(stage: Stage) -> str:
    large = {k: v for k, v in stage.device.items() if v >= SMALL * stage.peak}
    rest = stage.peak - sum(large.values())
    said = [f"{k} {v / GIB:.1f}" for k, v in sorted(large.items(), key=lambda item: -item[1])]
    return ", ".join([*said, f"the rest {rest / GIB:.1f}"] if rest >= 0.05 * GIB else said)


def other_ways(forecast: Forecast) -> Iterator[str]:
    found = forecast.all()
    yield "| train | replicate | shard | sequence | draw | peak, GiB | fits | s a step |"
    yield "|---|---|---|---|---|---|---|---|"
    best = next((way for way in found if way.fits), None)
    for way in found[:SHOWN]:
        mark = "**" if way is best else ""
        layout = way.layout
        draw = f"{way.servers}, {way.mode}" if way.servers else "all"
        cells = (layout.world, layout.replicate, layout.shard, layout.sequence, draw, f"{way.peak / GIB:.1f}")
        fits = "yes" if way.fits else "no"
        yield f"| {' | '.join(map(str, cells))} | {fits} | {mark}{way.seconds:.2f}{mark} |"
    if len(found) > SHOWN:
        yield f"\n{len(found) - SHOWN} other ways are slower or do not fit."
    if any(way.servers for way in found[:SHOWN]) and forecast.ways.settings.trainer.mode == "colocated":
        yield "\nWhat weights take to the servers is not counted."
    if best is None:
        yield "\nNone fits: more GPUs, or the settings above."
    else:
        yield "\nFor the marked one: " + " ".join(overrides(best, forecast.ways.settings))
