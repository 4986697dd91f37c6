"""Reads a checkpoint's safetensors into the packed weights of the fused kernels.

The files are mapped, not read: one tensor at a time is packed, and bfloat16, which NumPy does not
know, goes in as its bits. Called on the engine thread; needs no MindSpore.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindstream.backends.mindspore.cpu.library import load_library
from mindstream.plugin.errors import ConfigError

WEIGHTS = {"bf16": 0, "int8": 1, "f32": 2}
CACHES = {"f32": 0, "bf16": 1}
SOURCE_TYPES = {"F32": 0, "BF16": 1, "F16": 2}
_NUMPY_TYPES = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<u2")}

EMBEDDING, HEAD, FINAL_NORM = 0, 1, 2
_GLOBAL = {
    "model.embed_tokens.weight": EMBEDDING,
    "lm_head.weight": HEAD,
    "model.norm.weight": FINAL_NORM,
}
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
# Some checkpoints carry this table; it is computed.
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
    eps: float
    tied: bool  # the head is the embedding

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> FusedShape:
        """From a Hugging Face config.json. Raises KeyError for a field that is not there."""
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            eps=config["rms_norm_eps"],
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    def obstacle(self, block_size: int) -> str | None:
        """Why the kernels cannot take this model; None if they can."""
        rules = (
            ("hidden_size", self.hidden, 32, 32768),
            ("intermediate_size", self.intermediate, 32, 32768),
            ("head_dim", self.head_dim, 32, 256),
            ("block_size", block_size, 16, 32768),
        )
        for name, value, multiple, most in rules:
            if value <= 0 or value % multiple or value > most:
                return f"{name} {value} is not a multiple of {multiple} up to {most}"
        if self.heads % self.kv_heads:
            return f"num_attention_heads {self.heads} is no multiple of the {self.kv_heads} KV heads"
        return None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, mapped; `data` holds bits where NumPy lacks the type."""

    name: str
    type: str  # F32, BF16 or F16
    data: NDArray[Any]


def checkpoint_tensors(model_dir: Path) -> Iterator[StoredTensor]:
    """All tensors of the directory's *.safetensors. Raises ConfigError for a file that is broken."""
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{model_dir}: no *.safetensors file; the fused kernels read only these")
    for path in files:
        yield from _file_tensors(path)


def _file_tensors(path: Path) -> Iterator[StoredTensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise ConfigError(f"{path}: the file is shorter than its header says")
        header: dict[str, Any] = json.loads(file.read(length))
    mapped = np.memmap(path, np.uint8, "r")
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind = entry["dtype"]
        if kind not in SOURCE_TYPES:
            raise ConfigError(f"{path}: {name} is {kind}; F32, BF16 and F16 can be read")
        begin, end = (8 + length + at for at in entry["data_offsets"])
        if end > mapped.size:
            raise ConfigError(f"{path}: {name} ends behind the end of the file")
        data = mapped[begin:end].view(_NUMPY_TYPES[kind]).reshape(entry["shape"])
        yield StoredTensor(name, kind, data)


class FusedWeights:
    """A model inside the kernel library; `handle` is the number its operators are given."""

    def __init__(self, shape: FusedShape, block_size: int, weights: str, cache: str) -> None:
        """Allocates. Raises ConfigError for shapes or names the kernels do not know."""
        self.shape = shape
        self._library = load_library()
        sizes = (shape.layers, shape.hidden, shape.heads, shape.kv_heads, shape.head_dim)
        sizes += (shape.intermediate, shape.vocab, block_size, WEIGHTS[weights], CACHES[cache])
        array = (ctypes.c_int64 * len(sizes))(*sizes)
        create = self._library.mindstream_model_create
        create.restype = ctypes.c_int64
        self.handle: int = create(array, ctypes.c_float(shape.eps))
        if self.handle == 0:
            raise ConfigError(f"the fused CPU kernels cannot take this model: {self._error()}")
        self._tied, self._int8 = shape.tied, weights == "int8"

    def put(self, tensor: StoredTensor) -> None:
        """Packs one tensor. Raises ConfigError for one that has no place or another shape."""
        what, layer = self._place(tensor.name)
        if what is None:
            return
        if what == EMBEDDING and self._tied:
            self._put(tensor, HEAD, layer)
            # Rows of the packed head serve as the embedding, except where it is rounded to int8.
            if not self._int8:
                return
        if what == HEAD and self._tied:
            return
        self._put(tensor, what, layer)

    def finish(self) -> None:
        """Raises ConfigError naming a tensor that is missing."""
        if self._library.mindstream_model_finish(ctypes.c_int64(self.handle)):
            raise ConfigError(f"the checkpoint is incomplete: {self._error()}")

    def close(self) -> None:
        """Frees the weights. Idempotent."""
        if self.handle:
            self._library.mindstream_model_free(ctypes.c_int64(self.handle))
            self.handle = 0

    def _place(self, name: str) -> tuple[int | None, int]:
        if name in _GLOBAL:
            return _GLOBAL[name], 0
        match = _LAYER_NAME.fullmatch(name)
        if match and match[2] in _LAYER:
            return _LAYER[match[2]], int(match[1])
        if _IGNORED.search(name):
            return None, 0
        raise ConfigError(f"the fused CPU kernels have no place for the tensor {name}")

    def _put(self, tensor: StoredTensor, what: int, layer: int) -> None:
        data = np.ascontiguousarray(tensor.data)
        rows, columns = data.shape if data.ndim == 2 else (1, data.size)
        error = self._library.mindstream_model_put(
            ctypes.c_int64(self.handle),
            ctypes.c_int64(layer),
            what,
            ctypes.c_void_p(data.ctypes.data),
            SOURCE_TYPES[tensor.type],
            ctypes.c_int64(rows),
            ctypes.c_int64(columns),
        )
        if error:
            raise ConfigError(f"{tensor.name} {list(data.shape)}: {self._error()}")

    def _error(self) -> str:
        return str(self._library.mindstream_error().decode())


def load_checkpoint(
    model_dir: Path, shape: FusedShape, block_size: int, weights: str, cache: str
) -> FusedWeights:
    """Packs a whole checkpoint. Raises ConfigError with the reason if it cannot."""
    loaded = FusedWeights(shape, block_size, weights, cache)
    try:
        for tensor in checkpoint_tensors(model_dir):
            loaded.put(tensor)
        loaded.finish()
    except BaseException:
        loaded.close()
        raise
    return loaded
