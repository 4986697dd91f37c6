"""The weight files: checked by their headers before anything is built, then read into the model.

The headers of all shards are read with plain file calls, so that a disagreement between config.json
and the weights is a sentence at once and not an exception of MindSpore after a minute.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindstream.backends.mindspore.config import ModelPlan
from mindstream.plugin.errors import ConfigError

_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER = 100 << 20  # the safetensors format's own bound


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor of a checkpoint lies."""

    file: Path
    dtype: str  # the safetensors name: F32, F16, BF16
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


def read_headers(model_dir: Path) -> dict[str, TensorEntry]:
    """All tensors of the directory's safetensors files by name; raises ConfigError."""
    files = sorted(
        p for p in model_dir.glob("*.safetensors") if p.name != "hyper_param.safetensors"
    )
    if not files:
        raise ConfigError(f"weight directory {model_dir} holds no *.safetensors file.")
    _check_index(model_dir, files)
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in _read_header(file).items():
            if name in entries:
                raise ConfigError(f"tensor {name} is in both {entries[name].file} and {file}.")
            entries[name] = entry
    return entries


def _check_index(model_dir: Path, files: list[Path]) -> None:
    index = model_dir / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}.") from None
    missing = sorted(named - {file.name for file in files})
    if missing:
        raise ConfigError(f"{index} names {', '.join(missing)}, missing from {model_dir}.")


def _read_header(file: Path) -> dict[str, TensorEntry]:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= min(size - 8, _MAX_HEADER):
                raise ValueError("its header is longer than the file")
            header = json.loads(stream.read(length))
        begin = 8 + length
        return {
            name: _entry(file, name, info, begin, size)
            for name, info in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file} is not a complete safetensors file: {error}.") from None


def _entry(file: Path, name: str, info: Any, begin: int, size: int) -> TensorEntry:
    first, last = info["data_offsets"]
    if begin + last > size:
        raise ValueError(f"tensor {name} ends at byte {begin + last} of {size}")
    entry = TensorEntry(file, info["dtype"], tuple(info["shape"]), begin + first)
    if entry.dtype in _FLOAT_BYTES:
        needed = math.prod(entry.shape) * _FLOAT_BYTES[entry.dtype]
        if last - first != needed:
            raise ValueError(f"tensor {name} has {last - first} bytes instead of {needed}")
    return entry


def check(entries: Mapping[str, TensorEntry], plan: ModelPlan) -> None:
    """Compares names, shapes and dtypes with config.json; raises ConfigError at a difference.

    Families with experts are only checked for their dtypes: MindFormers names what it misses.
    """
    for name, entry in entries.items():
        if entry.dtype not in _FLOAT_BYTES:
            raise ConfigError(
                f"{entry.file}: tensor {name} is {entry.dtype}; expected F32, F16 or BF16."
            )
    if plan.family not in ("qwen2", "qwen3"):
        return
    expected = dict(_expected(plan))
    for name, shape in expected.items():
        found = entries.get(name)
        if found is None:
            raise ConfigError(
                f"{plan.model_dir}: tensor {name} of shape {list(shape)}, which config.json asks "
                f"for, is in none of the weight files."
            )
        if found.shape != shape:
            raise ConfigError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}, but config.json asks "
                f"for {list(shape)}."
            )
    for name in entries:
        tied_head = plan.tied and name == "lm_head.weight"
        if name not in expected and not tied_head and not name.endswith("rotary_emb.inv_freq"):
            raise ConfigError(
                f"{entries[name].file}: tensor {name} has no place in the model that config.json "
                f"describes ({plan.model_config['model_type']}, {plan.layers} layers)."
            )


def _expected(plan: ModelPlan) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, q_rows, kv_rows = plan.hidden, plan.heads * plan.head_dim, plan.kv_heads * plan.head_dim
    yield "model.embed_tokens.weight", (plan.vocab, hidden)
    for index in range(plan.layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield f"{layer}.self_attn.{letter}_proj.weight", (rows, hidden)
            if plan.qkv_bias:
                yield f"{layer}.self_attn.{letter}_proj.bias", (rows,)
        if plan.family == "qwen3":
            yield f"{layer}.self_attn.q_norm.weight", (plan.head_dim,)
            yield f"{layer}.self_attn.k_norm.weight", (plan.head_dim,)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, q_rows)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (plan.intermediate, hidden)
        yield f"{layer}.mlp.up_proj.weight", (plan.intermediate, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, plan.intermediate)
    yield "model.norm.weight", (hidden,)
    if not plan.tied:
        yield "lm_head.weight", (plan.vocab, hidden)


class Float32Slice:
    """A tensor of a checkpoint that gives float32 rows when they are asked for.

    It stands where MindFormers' loaders expect a safetensors slice. Only the rows in question are
    ever in memory in the file's own type.
    """

    def __init__(self, entry: TensorEntry) -> None:
        self._entry = entry

    def get_shape(self) -> list[int]:
        """As safetensors' slice has it."""
        return list(self._entry.shape)

    def __getitem__(self, key: Any) -> NDArray[np.float32]:
        rows = key[0] if isinstance(key, tuple) else key
        whole = self._entry.shape
        if not isinstance(rows, slice) or not whole:
            return np.asarray(self._read(0, whole)[key], np.float32)
        first, last, step = rows.indices(whole[0])
        found = self._read(first, (max(last - first, 0), *whole[1:]))[::step]
        if rows is not key:
            found = found[(slice(None), *key[1:])]
        return np.asarray(found, np.float32)

    def _read(self, first_row: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        entry = self._entry
        element = _FLOAT_BYTES[entry.dtype]
        row_elements = math.prod(shape[1:])
        raw_type = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry.dtype]
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset + first_row * row_elements * element)
            raw = np.fromfile(stream, raw_type, math.prod(shape))
        if entry.dtype == "BF16":  # a bfloat16 is the upper half of a float32
            raw = (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32, copy=False).reshape(shape)


def load(model: Any, plan: ModelPlan, entries: Mapping[str, TensorEntry]) -> None:
    """Fills the model's parameters through MindFormers' loaders, which split, stack and shard.

    On Ascend MindFormers reads the files itself. On CPU it is handed float32 slices, because its
    loaders take over the file's dtype. On the engine thread. Raises ConfigError.
    """
    try:
        if plan.device == "Ascend":
            model.load_weights(str(plan.model_dir))
            return
        pieces = ((model.convert_name(n), Float32Slice(e)) for n, e in _used(entries, plan))
        loaded = model.model.load_weights(pieces, model.generate_mapping(), True)
        model.process_weights_after_loading(model.model)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"{plan.model_dir}: MindFormers cannot load the weights: {error}"
        ) from error
    needed = set(model.model.get_params_dict())
    if plan.tied:
        needed -= {"output_layer.weight"}
    if missing := sorted(needed - loaded):
        raise ConfigError(f"{plan.model_dir}: no weights for {', '.join(missing[:5])}.")


def _used(entries: Mapping[str, TensorEntry], plan: ModelPlan) -> Iterator[tuple[str, TensorEntry]]:
    for name, entry in entries.items():
        if not name.endswith("rotary_emb.inv_freq") and not (
            plan.tied and name == "lm_head.weight"
        ):
            yield name, entry
