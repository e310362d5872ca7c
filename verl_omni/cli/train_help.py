"""The settings of a run as a page: those that matter first, a section of them, or all."""

from collections.abc import Iterable

from verl_omni.config.knob import Knob, typed, walk
from verl_omni.config.schema import DiffusionTrainerConfig
from verl_omni.config.sections import FIRST, SECTIONS, is_in
from verl_omni.utils.suggest import unknown


def help_text(topic: str = "") -> str:
    """With no topic the ten that matter and the names of the sections; `all`, or one section, in full."""
    knobs = {knob.name: knob for knob in walk(DiffusionTrainerConfig)}
    if topic == "all":
        return "\n".join(_section(name, knobs.values()) for name in SECTIONS)
    if topic:
        if topic in knobs:
            return _shown([knobs[topic]])
        inside = [knob for name, knob in knobs.items() if name.startswith(f"{topic}.")]
        if not inside:
            raise ValueError(unknown("section of --help", topic, ["all", *SECTIONS]))
        return _shown(inside)
    counts = {name: sum(is_in(knob.name, name) for knob in knobs.values()) for name in SECTIONS}
    listed = [f"  {name:<32} {counts[name]:>3}  {about}" for name, about in SECTIONS.items()]
    return "\n".join(
        [
            "The ten settings that matter, each with its default:\n",
            _shown([knobs[name] for name in FIRST]),
            f"All {len(knobs)}, by section: --help SECTION, or --help all\n",
            *listed,
        ]
    )


def _section(name: str, knobs: Iterable[Knob]) -> str:
    return f"{name}: {SECTIONS[name]}\n\n{_shown(knob for knob in knobs if is_in(knob.name, name))}"


def _shown(knobs: Iterable[Knob]) -> str:
    return "".join(f"  {knob.name}={typed(knob.default)}\n      {knob.text()}\n" for knob in knobs)
