"""A decoder of the LLaMA kind in NumPy and float64, from a checkpoint's tensors by their names.

The reference for shapes that goldens.npz does not have. Biases and the norms of queries and keys
are used where there are some, and without a head the embedding is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rotary(positions: Array, head_dim: int, theta: float = 10000.0) -> tuple[Array, Array]:
    """Cosines and sines [positions, head_dim] in float32."""
    half = head_dim // 2
    angles = positions[:, None] / theta ** (np.arange(half) / half)
    angles = np.concatenate([angles, angles], 1)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def decode(
    tensors: Mapping[str, Array],
    ids: Sequence[int],
    *,
    layers: int,
    heads: tuple[int, int, int],
    eps: float,
    theta: float = 10000.0,
) -> tuple[Array, Array]:
    """The whole sequence at once: hidden rows and logits. `heads`: query heads, KV heads, size."""
    w = {k: v.astype(np.float64) for k, v in tensors.items()}
    x = w["model.embed_tokens.weight"][list(ids)]
    turns = rotary(np.arange(len(ids)), heads[2], theta)
    cos, sin = (t.astype(np.float64)[:, None] for t in turns)
    for i in range(layers):
        at = f"model.layers.{i}."
        layer = {k[len(at) :]: v for k, v in w.items() if k.startswith(at)}
        y = _norm(x, layer["input_layernorm.weight"], eps)
        x = x + _attention(layer, y, heads, eps, cos, sin)
        y = _norm(x, layer["post_attention_layernorm.weight"], eps)
        gate = y @ layer["mlp.gate_proj.weight"].T
        up = y @ layer["mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T
    x = _norm(x, w["model.norm.weight"], eps)
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return x, np.asarray(x @ head.T)


def _attention(
    layer: Mapping[str, Array],
    x: Array,
    heads: tuple[int, int, int],
    eps: float,
    cos: Array,
    sin: Array,
) -> Array:
    (q_heads, kv_heads, dim), n = heads, len(x)

    def split(name: str, count: int) -> Array:
        y: Array = x @ layer[f"self_attn.{name}_proj.weight"].T
        y = y + layer.get(f"self_attn.{name}_proj.bias", 0.0)
        return np.asarray(y.reshape(n, count, dim))

    def turned(y: Array, name: str) -> Array:
        if f"self_attn.{name}_norm.weight" in layer:
            y = _norm(y, layer[f"self_attn.{name}_norm.weight"], eps)
        a, b = np.split(y, 2, -1)
        return np.asarray(y * cos + np.concatenate([-b, a], -1) * sin)

    q, k = turned(split("q", q_heads), "q"), turned(split("k", kv_heads), "k")
    q = q.reshape(n, kv_heads, -1, dim)
    v, out = split("v", kv_heads), np.zeros((n, q_heads * dim))
    for begin in range(0, n, 512):  # all scores of a long prompt would not fit in memory
        rows = slice(begin, min(begin + 512, n))
        scores = np.einsum("ikgd,jkd->kgij", q[rows], k[: rows.stop], optimize=True)
        scores /= np.sqrt(dim)
        seen = np.arange(rows.stop) <= np.arange(rows.start, rows.stop)[:, None]
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        found = np.einsum("kgij,jkd->ikgd", weights, v[: rows.stop], optimize=True)
        out[rows] = found.reshape(rows.stop - rows.start, -1)
    return np.asarray(out @ layer["self_attn.o_proj.weight"].T)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight)
