"""`serving.cpu.kernels: fused`: the model as one operator of the MindFormers graph.

MindFormers builds its model as ever, from its own class and configuration, and with the fused
cells where its embedding, decoder and head would be: so no float32 copy of a weight ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mindstream.backends.mindspore.config import ModelPlan
from mindstream.backends.mindspore.cpu.fused_weights import (
    WEIGHT_BYTES,
    FusedShape,
    FusedWeights,
)
from mindstream.backends.mindspore.cpu.library import library_path, set_threads
from mindstream.backends.mindspore.weights import TensorEntry
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import CpuConfig

_NUMPY_TYPES = {"F32": "<f4", "BF16": "<u2", "F16": "<u2"}


def shape_of(plan: ModelPlan) -> FusedShape:
    """What the kernels need to know of a plan."""
    return FusedShape(
        layers=plan.layers,
        hidden=plan.hidden,
        heads=plan.heads,
        kv_heads=plan.kv_heads,
        head_dim=plan.head_dim,
        intermediate=plan.intermediate,
        vocab=plan.vocab,
        block_size=plan.block_size,
        eps=float(plan.model_config.get("rms_norm_eps", 1e-6)),
        tied=plan.tied,
    )


def obstacle(plan: ModelPlan) -> str | None:
    """Why the fused kernels cannot run a plan; None if they can."""
    if library_path() is None:
        return "mindstream was installed without a C++ compiler"
    if plan.family not in ("qwen2", "qwen3"):
        return f"model family {plan.family} has no fused kernels"
    return shape_of(plan).obstacle()


class FusedKernels:
    """The kernel set: see `kernel_sets.KernelSet`."""

    name = "fused"
    owns_weights = True

    def __init__(self, config: CpuConfig, plan: ModelPlan) -> None:
        self._config = config
        self._plan = plan
        self._shape = shape_of(plan)
        self._cache = config.kv_cache
        if self._cache == "auto":  # as precise as the weights
            self._cache = "f32" if config.weights == "f32" else "bf16"
        self.kv_dtype = "bfloat16" if self._cache == "bf16" else "float32"
        self.weight_bytes = WEIGHT_BYTES[config.weights]

    @contextmanager
    def building(self) -> Iterator[None]:
        from mindformers.parallel_core.inference.base_models.gpt import gpt_model

        from mindstream.backends.mindspore.cpu import fused_cells as cells

        library = library_path()
        if library is None:
            raise ConfigError("mindstream's compiled CPU kernels have disappeared.")
        set_threads(self._config.threads)
        self._weights = FusedWeights(self._shape, self._config.weights, self._cache)
        number = self._weights.handle
        replaced: dict[str, Any] = {
            "LanguageModelEmbedding": lambda **_: cells.embedding_cell(number),
            "TransformerBlock": lambda **_: cells.decoder_cell(library, number),
            "ColumnParallelLinear": lambda *_, **__: cells.head_cell(),
        }
        originals = {name: getattr(gpt_model, name) for name in replaced}
        try:
            for name, value in replaced.items():
                setattr(gpt_model, name, value)
            yield
        finally:
            for name, value in originals.items():
                setattr(gpt_model, name, value)

    def load(self, entries: Mapping[str, TensorEntry]) -> None:
        """Packs the checkpoint from its mapped files. Raises ConfigError."""
        files: dict[Any, Any] = {}
        for name, entry in entries.items():
            if entry.file not in files:
                files[entry.file] = np.memmap(entry.file, np.uint8, "r")
            kind = np.dtype(_NUMPY_TYPES[entry.dtype])
            size = int(np.prod(entry.shape)) * kind.itemsize
            raw = files[entry.file][entry.offset : entry.offset + size]
            self._weights.put(name, entry.dtype, raw.view(kind).reshape(entry.shape))
        self._weights.finish()

    def install(self, model: Any, num_blocks: int) -> None:
        from mindstream.backends.mindspore.cpu import fused_cells as cells

        rotary = model.model.rotary_pos_emb
        model.model.rotary_pos_emb = cells.rotary_tables_cell(rotary.cos_cache, rotary.sin_cache)
        model.model.move_lens_to_cpu = False  # MoveTo has no CPU kernel, and no use here

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """One array for all layers."""
        return [self._shape.cache_shape(num_blocks, self._cache)]
