"""Folders with the configs of the real models that recipes train, text encoders as well, and without weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import models

# The text encoders, of which `models` has the width alone.
QWEN_VL_7B = {
    "text_config": {
        "num_hidden_layers": 28, "layer_types": ["full_attention"] * 28, "intermediate_size": 18944,
        "vocab_size": 152064,
    },
    "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
}  # fmt: skip
GEMMA3_12B = {
    "text_config": {
        "num_hidden_layers": 48, "layer_types": ["sliding_attention"] * 48, "intermediate_size": 15360,
        "num_key_value_heads": 8, "vocab_size": 262208,
    },
    "vision_config": {
        "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
    },
}  # fmt: skip
CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "vocab_size": 49408,
}  # fmt: skip
CLIP_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "vocab_size": 49408,
}  # fmt: skip
T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
UMT5_XXL = T5_XXL | {"vocab_size": 256384}
UMT5_BASE = {"d_model": 768, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "vocab_size": 256384}


def sd35_medium(out: Path) -> Path:
    models.sd35_medium(out, t5=True)
    _enlarge(out, text_encoder=CLIP_L, text_encoder_2=CLIP_G, text_encoder_3=T5_XXL)
    return out


def qwen_image(out: Path) -> Path:
    models.qwen_image(out)
    _enlarge(out, text_encoder=QWEN_VL_7B)
    return out


def flux_dev(out: Path) -> Path:
    models.flux_dev(out)
    _enlarge(out, text_encoder=CLIP_L, text_encoder_2=T5_XXL)
    return out


def flux_kontext(out: Path) -> Path:
    models.flux_kontext(out)
    _enlarge(out, text_encoder=CLIP_L, text_encoder_2=T5_XXL)
    return out


def wan_1_3b(out: Path) -> Path:
    models.wan_1_3b(out)
    _enlarge(out, text_encoder=UMT5_XXL)
    return out


def wan_ti2v_5b(out: Path) -> Path:
    models.wan_ti2v_5b(out)
    _enlarge(out, text_encoder=UMT5_XXL)
    return out


def ltx2(out: Path) -> Path:
    models.ltx2(out)
    # of the text encoder's layers, and of what it embeds before them
    _enlarge(out, text_encoder=GEMMA3_12B, connectors={"text_proj_in_factor": 49})
    return out


def longcat_audio(out: Path) -> Path:
    models.longcat_audio(out)
    _enlarge(out, text_encoder=UMT5_BASE)
    return out


# How the names of recipes begin
OF_RECIPES: dict[str, Callable[[Path], Path]] = {
    "flux_dev": flux_dev,
    "flux_kontext": flux_kontext,
    "longcat": longcat_audio,
    "ltx2": ltx2,
    "qwen_image": qwen_image,
    "sd35m": sd35_medium,
    "wan_1_3b": wan_1_3b,
    "wan_ti2v_5b": wan_ti2v_5b,
}
WITH_IMAGES = ("flux_kontext", "wan_ti2v_5b")  # whose rows have one


def kind_of(recipe: str) -> str:
    """Which of `OF_RECIPES` it trains."""
    (kind,) = (kind for kind in OF_RECIPES if recipe.startswith(f"{kind}_"))
    return kind


def _enlarge(folder: Path, **parts: dict[str, Any]) -> None:
    for part, larger in parts.items():
        path = folder / part / "config.json"
        config = json.loads(path.read_text())
        for name, value in larger.items():
            if not isinstance(value, dict):
                config[name] = value
            else:  # older versions of transformers have no part of its own for the text
                config.get(name, config).update(value)
        path.write_text(json.dumps(config, indent=1))
