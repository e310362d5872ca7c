"""LoRA under kohya's keys, which ComfyUI reads: `lora_unet_<layer>.lora_down.weight`, `.lora_up.weight`, `.alpha`.

A layer has the name that the model's authors gave it, with _ for a dot. Where diffusers' is another one, the table
below has both; where theirs is one layer and diffusers' are several (q, k and v), one LoRA is made of the several.
"""

from collections.abc import Callable, Mapping

import torch

NAMES = {"lora_A": "lora_down", "lora_B": "lora_up"}
Tree = Mapping[str, torch.Tensor]

# diffusers' blocks -> their blocks, and of each their layer -> diffusers' one or several.
FLUX = {
    "transformer_blocks": (
        "double_blocks",
        {
            "img_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "img_attn_proj": ("attn.to_out.0",),
            "img_mlp_0": ("ff.net.0.proj",),
            "img_mlp_2": ("ff.net.2",),
            "img_mod_lin": ("norm1.linear",),
            "txt_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "txt_attn_proj": ("attn.to_add_out",),
            "txt_mlp_0": ("ff_context.net.0.proj",),
            "txt_mlp_2": ("ff_context.net.2",),
            "txt_mod_lin": ("norm1_context.linear",),
        },
    ),
    "single_transformer_blocks": (
        "single_blocks",
        {
            "linear1": ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
            "linear2": ("proj_out",),
            "modulation_lin": ("norm.linear",),
        },
    ),
}
_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
WAN = {
    "blocks": (
        "blocks",
        {
            **{f"self_attn_{theirs}": (f"attn1.{ours}",) for theirs, ours in _ATTENTION.items()},
            **{f"cross_attn_{theirs}": (f"attn2.{ours}",) for theirs, ours in _ATTENTION.items()},
            "cross_attn_k_img": ("attn2.add_k_proj",),  # of Wan2.1 with a first frame
            "cross_attn_v_img": ("attn2.add_v_proj",),
            "ffn_0": ("ffn.net.0.proj",),
            "ffn_2": ("ffn.net.2",),
        },
    )
}
# Without norm1_context: of the last block diffusers has its outputs in another order.
SD3 = {
    "transformer_blocks": (
        "joint_blocks",
        {
            "x_block_attn_qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "x_block_attn_proj": ("attn.to_out.0",),
            "x_block_attn2_qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),  # of SD3.5-medium
            "x_block_attn2_proj": ("attn2.to_out.0",),
            "x_block_mlp_fc1": ("ff.net.0.proj",),
            "x_block_mlp_fc2": ("ff.net.2",),
            "x_block_adaLN_modulation_1": ("norm1.linear",),
            "context_block_attn_qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
            "context_block_attn_proj": ("attn.to_add_out",),
            "context_block_mlp_fc1": ("ff_context.net.0.proj",),
            "context_block_mlp_fc2": ("ff_context.net.2",),
        },
    )
}
# None: their names are diffusers' own.
KNOWN = {
    "QwenImagePipeline": None,
    "QwenImageEditPlusPipeline": None,
    "ZImagePipeline": None,
    "FluxPipeline": FLUX,
    "FluxKontextPipeline": FLUX,
    "ChromaPipeline": FLUX,
    "WanPipeline": WAN,
    "WanImageToVideoPipeline": WAN,
    "StableDiffusion3Pipeline": SD3,
}


def as_kohya(
    architecture: str, state: Tree, alpha: float | None, rows: Callable[[str], int]
) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA (`<layer>.lora_A.weight`, ...) under kohya's keys; alpha is what it is divided by the rank.

    `rows` says how many outputs a layer of the model has: of one that is part of another's and was not trained.
    """
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        layer, side, _ = key.removeprefix("transformer.").rsplit(".", 2)
        layers.setdefault(layer, {})[side] = tensor
    found: dict[str, torch.Tensor] = {}
    groups = _groups(architecture, list(layers))
    for name, parts in groups.items():
        known = [layers[part] for part in parts if part in layers]
        rank = len(known[0]["lora_A"])
        pair = known[0] if len(parts) == 1 else _joined([layers.get(part) for part in parts], parts, known[0], rows)
        for side, theirs in NAMES.items():
            found[f"lora_unet_{name}.{theirs}.weight"] = pair[side].contiguous()
        found[f"lora_unet_{name}.alpha"] = torch.tensor(float(rank if alpha is None else alpha) * len(parts))
    return found


def _groups(architecture: str, layers: list[str]) -> dict[str, tuple[str, ...]]:
    """Their layer -> diffusers' layers that it is made of, of which one at least was trained."""
    table = KNOWN[architecture]
    if table is None:
        return {layer.replace(".", "_"): (layer,) for layer in layers}
    groups = {}
    for layer in layers:
        blocks, number, inner = layer.split(".", 2)
        theirs, names = table.get(blocks, ("", {}))
        found = next((name for name, parts in names.items() if inner in parts), None)
        if found is None:
            raise ValueError(f"--format kohya: {architecture} has no name for the layer {layer} that ComfyUI knows")
        groups[f"{theirs}_{number}_{found}"] = tuple(f"{blocks}.{number}.{part}" for part in names[found])
    return groups


def _joined(
    pairs: list[dict[str, torch.Tensor] | None], names: tuple[str, ...], like: Tree, rows: Callable[[str], int]
) -> dict[str, torch.Tensor]:
    """Layers with one input and their outputs behind each other: a part of the rank for each, and nothing between."""
    rank, width = like["lora_A"].shape
    zero = like["lora_A"].new_zeros
    down = [pair["lora_A"] if pair else zero(rank, width) for pair in pairs]
    up = [pair["lora_B"] if pair else zero(rows(name), rank) for pair, name in zip(pairs, names, strict=True)]
    return {"lora_A": torch.cat(down), "lora_B": torch.block_diag(*up)}
