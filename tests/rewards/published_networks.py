"""HPS v2 and ImageReward in numpy and float64, straight from checkpoints with their published names."""

import math
from collections.abc import Mapping

import numpy as np

Weights = Mapping[str, np.ndarray]
erf = np.vectorize(math.erf)


def below(weights: Weights, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}


def linear(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def norm(x: np.ndarray, w: Weights, name: str, eps: float) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + erf(x / math.sqrt(2))) / 2


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, allowed: np.ndarray) -> np.ndarray:
    """`q` (n, width), `k` and `v` (m, width); `allowed` (n, m) says who may look at whom."""
    found = []
    for a, b, c in zip(*(np.split(x, heads, -1) for x in (q, k, v)), strict=True):
        logits = np.where(allowed, a @ b.T / math.sqrt(a.shape[-1]), -np.inf)
        share = np.exp(logits - logits.max(-1, keepdims=True))
        found.append(share / share.sum(-1, keepdims=True) @ c)
    return np.concatenate(found, -1)


def patches(pixels: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """A convolution whose stride is its size, by hand: (patches, width), row by row."""
    size = weight.shape[-1]
    rows, columns = (side // size for side in pixels.shape[1:])
    cut = [
        pixels[:, r * size : (r + 1) * size, c * size : (c + 1) * size].ravel()
        for r in range(rows)
        for c in range(columns)
    ]
    return np.stack(cut) @ weight.reshape(len(weight), -1).T


def block(x: np.ndarray, w: Weights, heads: int, allowed: np.ndarray) -> np.ndarray:
    """A layer of open_clip: norm first, query, key and value out of one matrix."""
    h = norm(x, w, "ln_1", 1e-5)
    q, k, v = np.split(h @ w["attn.in_proj_weight"].T + w["attn.in_proj_bias"], 3, -1)
    x = x + linear(attention(q, k, v, heads, allowed), w, "attn.out_proj")
    return x + linear(gelu(linear(norm(x, w, "ln_2", 1e-5), w, "mlp.c_fc")), w, "mlp.c_proj")


def hpsv2(w: Weights, pixels: np.ndarray, ids: list[int], layers: int, vision_heads: int, text_heads: int) -> float:
    """cos(image, text); `ids` end with the end token, where the text is taken from."""
    v = below(w, "visual.")
    x = np.concatenate([v["class_embedding"][None], patches(pixels, v["conv1.weight"])]) + v["positional_embedding"]
    x = norm(x, v, "ln_pre", 1e-5)
    for number in range(layers):
        everyone = np.ones((len(x), len(x)), bool)
        x = block(x, below(v, f"transformer.resblocks.{number}."), vision_heads, everyone)
    image = norm(x[0], v, "ln_post", 1e-5) @ v["proj"]
    x = w["token_embedding.weight"][ids] + w["positional_embedding"][: len(ids)]
    for number in range(layers):
        backwards = np.tril(np.ones((len(x), len(x)), bool))
        x = block(x, below(w, f"transformer.resblocks.{number}."), text_heads, backwards)
    text = norm(x[-1], w, "ln_final", 1e-5) @ w["text_projection"]
    return float(image @ text / np.linalg.norm(image) / np.linalg.norm(text))


def head(w: Weights, x: np.ndarray) -> float:
    """Linear layers with nothing between them but the dropout that scoring has not."""
    for number in (0, 2, 4, 6, 7):
        x = linear(x, w, f"layers.{number}")
    return float(x[0])


def image_reward(w: Weights, pixels: np.ndarray, ids: list[int], layers: int, heads: tuple[int, int]) -> float:
    """`ids` from [CLS] to [SEP], without padding, which nobody looks at."""
    v = below(w, "blip.visual_encoder.")
    x = patches(pixels, v["patch_embed.proj.weight"]) + v["patch_embed.proj.bias"]
    x = np.concatenate([v["cls_token"][0], x]) + v["pos_embed"][0]
    everyone = np.ones((len(x), len(x)), bool)
    for number in range(layers):
        b = below(v, f"blocks.{number}.")
        q, k, u = np.split(linear(norm(x, b, "norm1", 1e-6), b, "attn.qkv"), 3, -1)
        x = x + linear(attention(q, k, u, heads[0], everyone), b, "attn.proj")
        x = x + linear(gelu(linear(norm(x, b, "norm2", 1e-6), b, "mlp.fc1")), b, "mlp.fc2")
    seen = norm(x, v, "norm", 1e-6)
    t = below(w, "blip.text_encoder.")
    x = t["embeddings.word_embeddings.weight"][ids] + t["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x, t, "embeddings.LayerNorm", 1e-12)
    for number in range(layers):
        b = below(t, f"encoder.layer.{number}.")
        for kind, looked_at in (("attention", None), ("crossattention", seen)):
            there = x if looked_at is None else looked_at
            q, k, u = (
                linear(x, b, f"{kind}.self.query"),
                *(linear(there, b, f"{kind}.self.{n}") for n in ("key", "value")),
            )
            found = attention(q, k, u, heads[1], np.ones((len(x), len(there)), bool))
            x = norm(x + linear(found, b, f"{kind}.output.dense"), b, f"{kind}.output.LayerNorm", 1e-12)
        h = linear(gelu(linear(x, b, "intermediate.dense")), b, "output.dense")
        x = norm(x + h, b, "output.LayerNorm", 1e-12)
    return (head(below(w, "mlp."), x[0]) - 0.16717362830052426) / 1.0333394966054072
