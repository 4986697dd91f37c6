"""A checkpoint's tensors into the packed weights of the fused kernels.

The files are mapped, not read: one tensor at a time is packed, and bfloat16, which NumPy does not
know, goes in as its bits. Called on the engine thread; needs no MindSpore.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindstream.backends.mindspore.cpu.library import load_library
from mindstream.plugin.errors import ConfigError

WEIGHTS = {"bf16": 0, "int8": 1, "f32": 2}
CACHES = {"f32": 0, "bf16": 1}
SOURCE_TYPES = {"F32": 0, "BF16": 1, "F16": 2}
# What a weight takes in memory; int8 has a bf16 scale for every 64.
WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0 + 2 / 64, "f32": 4.0}

EMBEDDING, HEAD = 0, 1
_GLOBAL = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD, "model.norm.weight": 2}
_LAYER = {
    "input_layernorm.weight": 3,
    "post_attention_layernorm.weight": 4,
    "self_attn.q_proj.weight": 5,
    "self_attn.k_proj.weight": 6,
    "self_attn.v_proj.weight": 7,
    "self_attn.o_proj.weight": 8,
    "mlp.gate_proj.weight": 9,
    "mlp.up_proj.weight": 10,
    "mlp.down_proj.weight": 11,
    "self_attn.q_proj.bias": 12,
    "self_attn.k_proj.bias": 13,
    "self_attn.v_proj.bias": 14,
    "self_attn.q_norm.weight": 15,
    "self_attn.k_norm.weight": 16,
}
# Some checkpoints carry this table; MindFormers computes it.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class FusedShape:
    """The sizes the kernels need; all counts are of elements."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    block_size: int
    eps: float
    tied: bool  # the head is the embedding

    def obstacle(self) -> str | None:
        """Why the kernels cannot take this model; None if they can."""
        rules = (
            ("hidden_size", self.hidden, 32, 32768),
            ("intermediate_size", self.intermediate, 32, 32768),
            ("head_dim", self.head_dim, 32, 256),
            ("block_size", self.block_size, 16, 32768),
        )
        for name, value, multiple, most in rules:
            if value <= 0 or value % multiple or value > most:
                return f"{name} {value} is not a multiple of {multiple} up to {most}"
        if self.heads * self.head_dim > 32768:
            return f"{self.heads} heads of {self.head_dim} are more than 32768 columns"
        return None

    def cache_shape(self, num_blocks: int, cache: str) -> tuple[int, int, int, int]:
        """Of the float32 array that is the key (or value) cache; bf16 takes half the words."""
        words = self.block_size * self.head_dim // (2 if cache == "bf16" else 1)
        return (self.layers, num_blocks, self.kv_heads, words)


class FusedWeights:
    """A model inside the kernel library; `handle` is the number its operators are given."""

    def __init__(self, shape: FusedShape, weights: str, cache: str) -> None:
        """Allocates. Raises ConfigError for shapes the kernels cannot take."""
        self._library = load_library()
        sizes = [shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim]
        sizes += [shape.intermediate, shape.vocab, shape.block_size, WEIGHTS[weights]]
        array = (ctypes.c_int64 * 10)(*sizes, CACHES[cache])
        create = self._library.mindstream_model_create
        create.restype = ctypes.c_int64
        self.handle: int = create(array, ctypes.c_float(shape.eps))
        if self.handle == 0:
            raise ConfigError(f"the fused CPU kernels cannot take this model: {self._error()}")
        self._tied, self._int8 = shape.tied, weights == "int8"

    def put(self, name: str, kind: str, data: NDArray[Any]) -> None:
        """Packs one tensor; `kind` is F32, BF16 or F16, the latter two as bits.

        Raises ConfigError for one that has no place or another shape.
        """
        what, layer = _place(name)
        if what is None or (what == HEAD and self._tied):
            return
        if what == EMBEDDING and self._tied:
            self._put(name, kind, data, HEAD, 0)
            # Rows of the packed head serve as the embedding, except where it is rounded to int8.
            if not self._int8:
                return
        self._put(name, kind, data, what, layer)

    def finish(self) -> None:
        """Raises ConfigError naming a tensor that is missing."""
        if self._library.mindstream_model_finish(ctypes.c_int64(self.handle)):
            raise ConfigError(f"the checkpoint is incomplete: {self._error()}")

    def close(self) -> None:
        """Frees the weights. Idempotent."""
        if self.handle:
            self._library.mindstream_model_free(ctypes.c_int64(self.handle))
            self.handle = 0

    def _put(self, name: str, kind: str, data: NDArray[Any], what: int, layer: int) -> None:
        data = np.require(data, requirements=["C", "A"])
        rows, columns = data.shape if data.ndim == 2 else (1, data.size)
        error = self._library.mindstream_model_put(
            ctypes.c_int64(self.handle),
            ctypes.c_int64(layer),
            what,
            ctypes.c_void_p(data.ctypes.data),
            SOURCE_TYPES[kind],
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
        )
        if error:
            raise ConfigError(f"{name} {list(data.shape)}: {self._error()}")

    def _error(self) -> str:
        return str(self._library.mindstream_error().decode())


def _place(name: str) -> tuple[int | None, int]:
    """(tensor number of the C interface, layer); None for what is not needed."""
    if name in _GLOBAL:
        return _GLOBAL[name], 0
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return _LAYER[match[2]], int(match[1])
    if _IGNORED.search(name):
        return None, 0
    raise ConfigError(f"the fused CPU kernels have no place for the tensor {name}")
