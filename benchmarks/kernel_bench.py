"""The fused CPU kernels alone, without MindSpore: steps of a model with random weights.

usage: kernel_bench.py [--shape smollm2-135m] [--weights bf16] [--kv-cache bf16] [--threads 0]

Each line gives the fastest of the repetitions, and how far it is from the two walls: reading the
weights and the cache once from memory (the bandwidth is measured too), and the matrix work.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from mindstream.backends.mindspore.cpu.fused_weights import (
    WEIGHT_BYTES,
    FusedShape,
    FusedWeights,
)
from mindstream.backends.mindspore.cpu.library import instruction_set, load_library, set_threads
from mindstream.backends.mindspore.host_memory import zeros

SHAPES = {
    "smollm2-135m": FusedShape(30, 576, 9, 3, 64, 1536, 49152, 16, 1e-5, True),
    "qwen3-0.6b": FusedShape(28, 1024, 16, 8, 128, 3072, 151936, 16, 1e-6, True),
}
_BLOCKS = 4096


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--weights", choices=sorted(WEIGHT_BYTES), default="bf16")
    parser.add_argument("--kv-cache", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--only", help="part of a line's name")
    options = parser.parse_args(arguments)
    set_threads(options.threads)
    bandwidth = read_bandwidth()
    print(f"{instruction_set()}, {load_library().mindstream_threads()} threads")
    print(f"memory: {bandwidth / 1e9:.1f} GB/s read")
    model = Model(SHAPES[options.shape], options.weights, options.kv_cache)
    print(f"{'step':<34}{'ms':>9}{'tokens/s':>10}{'GB/s':>7}{'GFLOP/s':>9}")
    for streams, context in ((1, 115), (8, 115), (32, 115), (1, 1500), (1, 8000)):
        name = f"decode, {streams} x {context} tokens cached"
        _line(model, options, name, [1] * streams, [context] * streams)
    for rows in (115, 512, 1500):
        _line(model, options, f"prefill, {rows} tokens", [rows], [0])
    model.weights.close()


def _line(model: Model, options: Any, name: str, new: list[int], cached: list[int]) -> None:
    if options.only and options.only not in name:
        return
    step = model.step(new, cached)
    step()
    best = min(step() for _ in range(options.repeat if sum(new) < 100 else 3))
    gigabytes = model.bytes_read(new, cached) / best / 1e9
    gigaflops = model.operations(new, cached) / best / 1e9
    rate = sum(new) / best
    print(
        f"{name:<34}{best * 1e3:>9.2f}{rate:>10.0f}{gigabytes:>7.1f}{gigaflops:>9.0f}", flush=True
    )


def read_bandwidth() -> float:
    """Bytes a second that all threads together read from memory."""
    data = np.ones(1 << 26, np.uint64)
    read = load_library().mindstream_read_all
    read.restype = ctypes.c_uint64
    seconds = []
    for _ in range(5):
        began = perf_counter()
        read(ctypes.c_void_p(data.ctypes.data), ctypes.c_int64(data.size))
        seconds.append(perf_counter() - began)
    return float(data.nbytes / min(seconds))


class Model:
    """Random weights inside the kernels, and a cache."""

    def __init__(self, shape: FusedShape, weights: str, cache: str) -> None:
        self.shape, self._kind, self._cache = shape, weights, cache
        self.weights = FusedWeights(shape, weights, cache)
        self.parameters = 0
        rng = np.random.default_rng(0)
        wide, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self._put(rng, "model.embed_tokens.weight", shape.vocab, shape.hidden)
        self._put(rng, "model.norm.weight", shape.hidden)
        for layer in range(shape.layers):
            at = f"model.layers.{layer}."
            self._put(rng, at + "input_layernorm.weight", shape.hidden)
            self._put(rng, at + "post_attention_layernorm.weight", shape.hidden)
            for name, rows in (("q", wide), ("k", kv), ("v", kv)):
                self._put(rng, f"{at}self_attn.{name}_proj.weight", rows, shape.hidden)
            self._put(rng, at + "self_attn.o_proj.weight", shape.hidden, wide)
            self._put(rng, at + "mlp.gate_proj.weight", shape.intermediate, shape.hidden)
            self._put(rng, at + "mlp.up_proj.weight", shape.intermediate, shape.hidden)
            self._put(rng, at + "mlp.down_proj.weight", shape.hidden, shape.intermediate)
        self.weights.finish()
        cache_shape = shape.cache_shape(_BLOCKS, cache)
        self._keys, self._values = zeros(cache_shape), zeros(cache_shape)
        for cache in (self._keys, self._values):
            cache[:] = 0  # pages never written to would all be one

    def _put(self, rng: np.random.Generator, name: str, *shape: int) -> None:
        data = rng.standard_normal(shape, np.float32) * np.float32(0.02)
        self.weights.put(name, "F32", data)
        self.parameters += data.size if len(shape) == 2 else 0

    def bytes_read(self, new: list[int], cached: list[int]) -> float:
        """Weights and cached tokens once."""
        s, element = self.shape, 2 if self._cache == "bf16" else 4
        tokens = sum(new) + sum(cached)
        cache = 2 * s.layers * s.kv_heads * s.head_dim * element * tokens
        return self.parameters * WEIGHT_BYTES[self._kind] + cache

    def operations(self, new: list[int], cached: list[int]) -> float:
        """Multiplications and additions; the head for one row a sequence."""
        s, head = self.shape, self.shape.vocab * self.shape.hidden
        pairs = sum(n * done + n * (n + 1) / 2 for n, done in zip(new, cached, strict=True))
        attention = 4 * s.layers * s.heads * s.head_dim * pairs
        return 2 * sum(new) * (self.parameters - head) + 2 * len(new) * head + attention

    def step(self, new: list[int], cached: list[int]) -> Any:
        """A function that runs one step and returns its seconds."""
        s, size = self.shape, self.shape.block_size
        blocks = [-(-(n + done) // size) for n, done in zip(new, cached, strict=True)]
        tables = np.full((len(new), max(blocks)), -1, np.int32)
        for b, count in enumerate(blocks):
            tables[b, :count] = np.arange(count) + sum(blocks[:b])
        positions = [np.arange(done, done + n) for n, done in zip(new, cached, strict=True)]
        slots = [tables[b][p // size] * size + p % size for b, p in enumerate(positions)]
        rows, half = sum(new), s.head_dim // 2
        angles = np.arange(max(map(sum, zip(new, cached, strict=True))))[:, None] / 1e5 ** (
            np.arange(s.head_dim) % half / half
        )
        logits = np.zeros((len(new), s.vocab), np.float32)
        inputs = [
            np.array([self.weights.handle], np.int64),
            np.zeros(s.vocab, np.float32),
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            np.arange(rows, dtype=np.int32),
            np.concatenate(positions).astype(np.int32),
            np.concatenate(slots).astype(np.int32),
            tables,
            np.array(new, np.int32),
            np.add(new, cached).astype(np.int32),
            (np.cumsum(new) - 1).astype(np.int32),
            self._keys,
            self._values,
        ]

        def run() -> float:
            began = perf_counter()
            _call("LanguageModel", *inputs, logits)
            return perf_counter() - began

        return run


def _call(symbol: str, *arrays: Any) -> None:
    count = len(arrays)
    shapes = [(ctypes.c_int64 * a.ndim)(*a.shape) for a in arrays]
    data = (ctypes.c_void_p * count)(*[a.ctypes.data for a in arrays])
    ndims = (ctypes.c_int * count)(*[a.ndim for a in arrays])
    table = (ctypes.c_void_p * count)(*[ctypes.addressof(s) for s in shapes])
    if getattr(load_library(), symbol)(count, data, ndims, table, None, None, None):
        raise RuntimeError(f"{symbol} refused its arguments")


if __name__ == "__main__":
    main()
