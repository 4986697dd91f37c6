"""What the kernel tests share: calling an operator as MindSpore does, and random decoders."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mindstream.backends.mindspore.cpu.fused_weights import FusedShape, FusedWeights
from mindstream.backends.mindspore.cpu.library import (
    instruction_set,
    library_path,
    load_library,
)

Array = NDArray[Any]


HERE = Path(__file__).parent
BUILDS_ITS_OWN = HERE / "test_sanitizers.py"


def _numpy_decoder() -> ModuleType:
    path = HERE.parent / "goldens" / "numpy_decoder.py"
    spec = importlib.util.spec_from_file_location("numpy_decoder", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


numpy_decoder = _numpy_decoder()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`items` are those of the whole run, and not of this directory alone."""
    if library_path() is None:
        for item in items:
            if item.path.parent == HERE and item.path != BUILDS_ITS_OWN:
                item.add_marker(pytest.mark.skip(reason="the kernels are not built"))


def build_amx_emulator(folder: Path) -> Path:
    library = folder / "amx_emulator.so"
    command = ["g++", "-O2", "-mfma", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, str(HERE / "amx_emulator.cc"), "-o", str(library)], check=True)
    return library


def load_amx_emulator(folder: Path) -> None:
    """Makes MINDSTREAM_CPU_ISA=amx_emulated exist; before the kernels are loaded."""
    library = ctypes.CDLL(str(build_amx_emulator(folder)), ctypes.RTLD_GLOBAL)
    library.mindstream_install_amx_emulator()
    assert instruction_set() == "amx_emulated"


@pytest.fixture(scope="session", name="build_amx_emulator")
def build_amx_emulator_fixture() -> Callable[[Path], Path]:
    return build_amx_emulator


@pytest.fixture(scope="session", autouse=True)
def amx_emulator(tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.environ.get("MINDSTREAM_CPU_ISA") == "amx_emulated":
        load_amx_emulator(tmp_path_factory.mktemp("amx"))


def call(symbol: str, *arrays: Array) -> int:
    """Calls an operator; the last array is the output."""
    for array in arrays:
        if not array.flags.c_contiguous:
            raise ValueError("an operator takes contiguous arrays")
    n = len(arrays)
    shapes = [(ctypes.c_int64 * a.ndim)(*a.shape) for a in arrays]
    data = (ctypes.c_void_p * n)(*[a.ctypes.data for a in arrays])
    ndims = (ctypes.c_int * n)(*[a.ndim for a in arrays])
    table = (ctypes.c_void_p * n)(*[ctypes.addressof(s) for s in shapes])
    error: int = getattr(load_library(), symbol)(n, data, ndims, table, None, None, None)
    return error


def i32(values: Any) -> NDArray[np.int32]:
    return np.ascontiguousarray(values, np.int32)


@dataclass
class Decoder:
    """Random weights, in the kernels and as float64 for NumPy."""

    shape: FusedShape
    weights: str
    cache: str
    biased: bool
    normed: bool
    seed: int
    blocks: int = 24
    sharpness: float = 1.0  # of the attention: with 1, many keys share it about evenly
    change: Callable[[str, Array], Array] = lambda _, data: (
        data
    )  # of each tensor, before it is used
    tensors: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, rng = self.shape, np.random.default_rng(self.seed)
        wide, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self._add(rng, "model.embed_tokens.weight", s.vocab, s.hidden)
        self._add(rng, "model.norm.weight", s.hidden)
        if not s.tied:
            self._add(rng, "lm_head.weight", s.vocab, s.hidden)
        for i in range(s.layers):
            at = f"model.layers.{i}."
            self._add(rng, at + "input_layernorm.weight", s.hidden)
            self._add(rng, at + "post_attention_layernorm.weight", s.hidden)
            for name, rows in (("q", wide), ("k", kv), ("v", kv)):
                self._add(rng, f"{at}self_attn.{name}_proj.weight", rows, s.hidden)
                if self.biased:
                    self._add(rng, f"{at}self_attn.{name}_proj.bias", rows)
            if self.normed:
                self._add(rng, at + "self_attn.q_norm.weight", s.head_dim)
                self._add(rng, at + "self_attn.k_norm.weight", s.head_dim)
            self._add(rng, at + "self_attn.o_proj.weight", s.hidden, wide)
            self._add(rng, at + "mlp.gate_proj.weight", s.intermediate, s.hidden)
            self._add(rng, at + "mlp.up_proj.weight", s.intermediate, s.hidden)
            self._add(rng, at + "mlp.down_proj.weight", s.hidden, s.intermediate)
        self.loaded = FusedWeights(s, self.weights, self.cache)
        for name, data in self.tensors.items():
            self.loaded.put(name, "F32", data)
        self.loaded.finish()
        # Rows nobody wrote must not matter: they hold NaN, in bfloat16 too.
        shape = s.cache_shape(self.blocks, self.cache)
        fill = np.full(shape, 0x7FC17FC1, np.uint32)
        self.keys, self.values = fill.view(np.float32), fill.copy().view(np.float32)
        self.model = np.array([self.loaded.handle], np.int64)

    def _add(self, rng: np.random.Generator, name: str, *shape: int) -> None:
        scale = 1.0 if len(shape) == 1 else shape[1] ** -0.5
        if name.endswith("q_proj.weight"):
            scale *= self.sharpness
        data = rng.standard_normal(shape, np.float32) * np.float32(scale)
        if self.weights == "bf16" and len(shape) == 2:  # then packing rounds nothing
            data = (data.view(np.uint32) & 0xFFFF0000).view(np.float32)
        self.tensors[name] = self.change(name, data)

    def run(
        self,
        batch: list[tuple[list[int], int, list[int]]],
        rows: list[int] | None = None,
        *,
        best: bool = False,
    ) -> Array:
        """`batch`: (new token ids, tokens cached, blocks) a sequence. Logits of all rows, or of
        those that `rows` names; or the ids of the largest ones alone [R, 1].
        """
        s, size = self.shape, self.shape.block_size
        ids = i32([t for new, _, _ in batch for t in new])
        positions = np.concatenate([np.arange(n, n + len(new)) for new, n, _ in batch])
        slots = [
            blocks[p // size] * size + p % size
            for new, n, blocks in batch
            for p in range(n, n + len(new))
        ]
        width = max(len(blocks) for _, _, blocks in batch)
        tables = [blocks + [-1] * (width - len(blocks)) for _, _, blocks in batch]
        wanted = i32(list(range(len(ids))) if rows is None else rows)
        out = np.zeros((len(wanted), 1 if best else s.vocab), np.float32)
        inputs: list[Array] = [
            self.model,
            np.ones(1, np.float32) if best else np.zeros(s.vocab, np.float32),
            *numpy_decoder.rotary(np.arange(positions.max() + 3), s.head_dim),
            ids,
            i32(positions),
            i32(slots),
            i32(tables),
            i32([len(new) for new, _, _ in batch]),
            i32([n + len(new) for new, n, _ in batch]),
            wanted,
            self.keys,
            self.values,
        ]
        assert call("LanguageModel", *inputs, out) == 0
        return out

    def expected(self, ids: list[int]) -> Array:
        """The whole sequence at once in float64: the logits of every row."""
        s = self.shape
        heads = (s.heads, s.kv_heads, s.head_dim)
        logits: Array = numpy_decoder.decode(
            self.tensors, ids, layers=s.layers, heads=heads, eps=s.eps
        )[1]
        return logits


@pytest.fixture(name="call", scope="session")
def call_fixture() -> Callable[..., int]:
    return call


@pytest.fixture
def decoder() -> Iterator[Callable[..., Decoder]]:
    """Makes decoders, and frees their weights after the test."""
    made: list[Decoder] = []

    def make(*args: Any, **settings: Any) -> Decoder:
        made.append(Decoder(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.loaded.close()
