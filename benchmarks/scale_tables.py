"""The tables of `benchmarks.scale`, from what is kept in measured.json: <!-- ARCHITECTURES -->, <!-- EIGHT BITS -->,
<!-- SIZES --> and <!-- RANKS -->, in whichever document has them."""

from collections.abc import Callable, Iterable

from benchmarks.fake_ranks import against
from benchmarks.measured import Figures
from verl_omni.report.document_tables import fill

There = dict[str, Figures]
# Of each architecture the setting that stands for it, and what it is.
ARCHITECTURES = {
    "sd35m: LoRA, micro-batch 44, 10 steps": "SD3.5-medium, CFG 4.5, KL, 9 trained steps",
    "qwen-image: LoRA, micro-batch 8, 10 steps": "Qwen-Image 20B, true CFG 4",
    "flux-dev: LoRA, micro-batch 4": "FLUX.1-dev 12B, guidance 3.5",
    "flux2-klein: LoRA, micro-batch 4": "FLUX.2-klein 4B, CFG 4",
    "flux2-dev: LoRA, micro-batch 4, checkpointing": "FLUX.2-dev 32B, guidance 4, checkpointing",
    "z-image: LoRA, micro-batch 4": "Z-Image 6B, CFG 4",
    "sd35-large: LoRA, micro-batch 4": "SD3.5-large 8B, CFG 4.5",
    "glm-image: LoRA, micro-batch 4": "GLM-Image 7B, CFG 1.5",
    "qwen-image-edit: LoRA, micro-batch 2, checkpointing": "Qwen-Image-Edit 20B, true CFG 4, checkpointing",
    "wan-1.3b: LoRA, micro-batch 4, 17 frames": "Wan2.1 1.3B, CFG 5; 17 frames",
    "wan-ti2v-5b: LoRA, micro-batch 4, 49 frames": "Wan2.2 TI2V 5B, CFG 5; 49 frames",
    "wan2.2: LoRA, micro-batch 1, 33 frames of 480 x 832, checkpointing": (
        "Wan2.2 A14B, both experts, CFG 4; 33 frames of 480 x 832, checkpointing"
    ),
    "ltx2: LoRA, micro-batch 4, 49 frames with sound, checkpointing": (
        "LTX-2 19B; 49 frames with 2 s of sound, checkpointing"
    ),
}
# head, name of the figure, how it is shown
Column = tuple[str, str, str]
SPEED: list[Column] = [("images", "images", "d"), ("images/s", "images/s", ".3g"), ("step, s", "step s", ".2f")]
PEAK: Column = ("peak, GiB", "peak GiB", ".1f")
RATIO: Column = ("first ratio off 1", "actor/first_ratio_max_dev", ".1e")
VAE: Column = ("VAE, s", "timing_s/gen_decode", ".2f")
OF_ARCHITECTURES: list[Column] = [
    *SPEED, PEAK, ("first step, s", "first step", ".0f"), ("rollout, TFLOP/s", "perf/tflops/gen", ".0f"),
    ("update, TFLOP/s", "perf/tflops/update_actor", ".0f"), VAE, RATIO, ("attention", "attention", ""),
]  # fmt: skip
OF_STEPS: list[Column] = [
    *SPEED, ("denoising, s", "timing_s/gen_denoise", ".2f"), VAE, ("reference, s", "timing_s/ref", ".2f"),
    ("old log-probabilities, s", "timing_s/old_log_prob", ".2f"), ("update, s", "timing_s/update_actor", ".2f"), PEAK,
    RATIO, ("ratio off 1, mean", "actor/rollout_ratio_mean_dev", ".1e"), ("KL to what drew", "rollout_corr/kl", ".1e"),
]  # fmt: skip
OF_RANKS: list[Column] = [
    ("rows", "rows", "d"), ("held, GiB", "held GiB", ".1f"), ("update, GiB", "update GiB", ".1f"),
    ("rollout, GiB", "rollout GiB", ".1f"), ("update, s", "update s", ".3f"), ("rollout, s", "rollout s", ".2f"),
    ("a row's update, to that of one rank alone", "against one", ".3f"),
]  # fmt: skip
SINGLE = "flux-dev: LoRA, folded, rank 0 of 1"
NOTHING = "Nothing has been measured yet."


def filled(text: str, there: There, titles: dict[str, list[str]]) -> str:
    """A document with those of the tables that it has marks for. `titles` are the settings of each group of `scale`."""
    sizes = [name for group in ("sizes", "video", "update") for name in titles[group] if not name.startswith("profile")]
    ranks = ["qwen-image: full, rank 0 of 8", *titles["ranks"], *titles["veomni"]]
    tables: dict[str, Callable[[], str]] = {
        "ARCHITECTURES": lambda: table(ARCHITECTURES.items(), there, OF_ARCHITECTURES),
        "EIGHT BITS": lambda: eight_bits_table(titles["fp8"], there),
        "SIZES": lambda: table(_plain(sizes), there, OF_STEPS),
        "RANKS": lambda: ranks_table(ranks, there),
    }
    own = {mark: made for mark, made in tables.items() if f"<!-- {mark} -->" in text}
    if not own:
        raise ValueError(f"the document has no <!-- {' -->, <!-- '.join(tables)} --> to fill")
    for mark, made in own.items():
        text = fill(text, mark, made())
    return text


def _plain(names: list[str]) -> list[tuple[str, str]]:
    return [(name, name) for name in names]


def table(rows: Iterable[tuple[str, str]], there: There, columns: list[Column]) -> str:
    """A row for each (setting, what it is) that was measured; columns that nobody has a figure for are left out."""
    known = [(shown, there[name]) for name, shown in rows if name in there]
    columns = [column for column in columns if any(column[1] in figures for _, figures in known)]
    if not known or not columns:
        return NOTHING
    lines = [f"| setting | {' | '.join(head for head, _, _ in columns)} |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join([*lines, *(f"| {shown} | {' | '.join(_cells(figures, columns))} |" for shown, figures in known)])


def eight_bits_table(names: list[str], there: There) -> str:
    """Beside the same in full; without anything in 8 bits there is nothing to compare."""
    measured = any(name in there for name in names if "8 bits" in name)
    return table(_plain(names), there, OF_STEPS) if measured else NOTHING


def ranks_table(names: list[str], there: There) -> str:
    """Beside what a rank takes, the seconds of a row's update against those of a rank that is alone, of that model."""
    model, alone = SINGLE.split(":")[0], there.get(SINGLE)
    compared = {name: there[name] for name in names if name in there}
    for name, figures in compared.items():
        if alone and name.startswith(f"{model}:"):
            compared[name] = figures | {"against one": against(figures, alone)}
    return table(_plain(names), compared, OF_RANKS)


def _cells(figures: Figures, columns: list[Column]) -> Iterable[str]:
    for _, name, shown in columns:
        value = figures.get(name)
        if value is None:
            yield ""
        elif isinstance(value, str):
            yield "torch's choice" if value == "native" else f"`{value}`"
        else:
            yield "0" if value == 0 else f"{value:{shown}}"
