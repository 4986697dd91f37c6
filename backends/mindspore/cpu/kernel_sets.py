"""What of a MindFormers model is replaced on CPU. The one place; nothing here runs on Ascend.

A kernel set takes part in building a model three times, on the engine thread: `building()` is open
while MindFormers constructs the cells, `install()` runs when the weights are in, and the graph is
compiled after it. `select` chooses the set from `serving.cpu.kernels`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from mindstream.backends.mindspore.config import ModelPlan
from mindstream.backends.mindspore.cpu import fused
from mindstream.backends.mindspore.cpu.library import library_path
from mindstream.backends.mindspore.weights import TensorEntry
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import CpuConfig

log = logging.getLogger("mindstream.mindspore")


class KernelSet(Protocol):
    """Replaces parts of one model."""

    name: str  # of serving.cpu.kernels, for the log and the key of the graph cache
    kv_dtype: str  # numpy name of the KV cache's elements
    owns_weights: bool  # `load` takes the weights; else MindFormers' parameters do
    weight_bytes: float  # memory of one weight

    def building(self) -> AbstractContextManager[None]:
        """While it is open, MindFormers' module specs give the set's cells."""

    def load(self, entries: Mapping[str, TensorEntry]) -> None:
        """Takes the checkpoint's tensors if the set owns the weights. Raises ConfigError."""

    def install(self, model: Any, num_blocks: int) -> None:
        """Replaces parts of the built and filled model, before its graph is compiled."""

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        """Of the float32 arrays that are the key cache, and of those that are the value cache."""


def select(config: CpuConfig, plan: ModelPlan) -> KernelSet:
    """The set that `serving.cpu.kernels` names; raises ConfigError if it cannot be had."""
    asked = config.kernels
    obstacle = None
    if asked in ("auto", "fused"):
        obstacle = fused.obstacle(plan)
        if obstacle is None:
            return fused.FusedKernels(config, plan)
        if asked == "fused":
            raise ConfigError(f"serving.cpu.kernels is 'fused', but {obstacle}; use 'auto'.")
    built = library_path() is not None
    if asked == "attention" and not built:
        raise ConfigError(
            "serving.cpu.kernels is 'attention', but mindstream was installed without its compiled "
            "kernels (no C++ compiler was found then); use 'stock' or install it again."
        )
    chosen: StockKernels | AttentionKernels = AttentionKernels(plan)
    if asked == "stock" or not built:
        chosen = StockKernels(plan)
    if config.kv_cache == "bf16":
        why = f" ({obstacle})" if obstacle else ""
        raise ConfigError(
            f"serving.cpu.kv_cache is 'bf16'; kernels {chosen.name!r}{why} keep float32 here."
        )
    if obstacle is not None:
        log.warning(
            "serving.cpu.kernels auto: %s; %r runs (%s), several times slower than 'fused'",
            obstacle,
            chosen.name,
            chosen.operators,
        )
    return chosen


def layer_caches(plan: ModelPlan, num_blocks: int) -> list[tuple[int, ...]]:
    """MindFormers' own layout: one array a layer."""
    return [(num_blocks, plan.block_size, plan.kv_heads, plan.head_dim)] * plan.layers


class _StockBase:
    """Stock operators for the norm, the rotary embedding and everything MindFormers has for CPU."""

    kv_dtype = "float32"
    owns_weights = False
    weight_bytes = 4.0

    def __init__(self, plan: ModelPlan) -> None:
        self._plan = plan

    @contextmanager
    def building(self) -> Iterator[None]:
        from mindformers.parallel_core.inference.base_models.gpt import gpt_layer_specs
        from mindformers.parallel_core.inference.transformer import transformer_block

        from mindstream.backends.mindspore.cpu import cells

        norms = {"RMSNorm": cells.rms_norm_cell()}
        patches: list[tuple[Any, str, Any]] = [
            (gpt_layer_specs, "get_norm_cls", norms.__getitem__),
            (transformer_block, "get_norm_cls", norms.__getitem__),
            (gpt_layer_specs, "FlashAttention", self._attention_cell()),
        ]
        originals = [(module, name, getattr(module, name)) for module, name, _ in patches]
        try:
            for module, name, value in patches:
                setattr(module, name, value)
            yield
        finally:
            for module, name, value in originals:
                setattr(module, name, value)

    def _attention_cell(self) -> Callable[..., Any]:
        raise NotImplementedError

    def load(self, entries: Mapping[str, TensorEntry]) -> None:
        raise NotImplementedError

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        return layer_caches(self._plan, num_blocks)

    def install(self, model: Any, num_blocks: int) -> None:
        from mindstream.backends.mindspore.cpu import cells

        rotary = cells.rotary_cell(self._plan.head_dim)
        for layer in model.model.decoder.layers:
            layer.self_attention.rotary_emb = rotary
        model.model.move_lens_to_cpu = False  # MoveTo has no CPU kernel, and no use here


class AttentionKernels(_StockBase):
    """Stock operators and the compiled ragged paged attention."""

    name = "attention"
    operators = "MindSpore's operators with the compiled attention"

    def _attention_cell(self) -> Callable[..., Any]:
        from mindstream.backends.mindspore.cpu import cells

        library = library_path()
        if library is None:
            raise ConfigError("mindstream's compiled CPU kernels have disappeared.")
        return cells.compiled_attention_cell(library)


class StockKernels(_StockBase):
    """MindSpore's own operators alone, for machines without a C++ compiler. Slow."""

    name = "stock"
    operators = "MindSpore's operators alone"

    def _attention_cell(self) -> Callable[..., Any]:
        from mindstream.backends.mindspore.cpu import stock_attention

        return stock_attention.stock_attention_cell()

    def install(self, model: Any, num_blocks: int) -> None:
        super().install(model, num_blocks)
        plan = self._plan
        for layer in model.model.decoder.layers:
            layer.self_attention.core_attention.allocate(num_blocks, plan.block_size, plan.kv_heads)

    def cache_shapes(self, num_blocks: int) -> list[tuple[int, ...]]:
        return layer_caches(self._plan, 1)  # the cells own the cache
