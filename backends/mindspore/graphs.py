"""The compiled graphs of one model and its KV cache. Engine thread only.

On CPU one ragged graph takes every mix of prompts, chunks and decodes: attention reads keys and
values through the block tables. On Ascend MindFormers' own two graphs run: "prefill"
(FlashAttentionScore) when every sequence is fresh, "increment" (PagedAttention) otherwise.
A graph is cached under its `phase`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mindstream.backends.engine.step_model import Batch, Chosen, Float32
from mindstream.backends.mindspore import host_memory
from mindstream.backends.mindspore.config import ModelPlan

# The inputs of MindFormers' models that a step gives, by their places; the others are None. Each
# one costs MindSpore's way into a graph some microseconds, given or not.
_GIVEN = (0, 2, 3, 4, 5, 6, 7, 8, 14, 15)


class Graphs:
    """A built and filled model, ready to compile. Raises whatever MindSpore raises."""

    def __init__(
        self, model: Any, plan: ModelPlan, cache_shapes: Sequence[tuple[int, ...]]
    ) -> None:
        import mindspore as ms

        self._ms = ms
        self._plan = plan
        self._compute_dtype = model.compute_dtype
        self._step = _step_cell(model)
        self._keys = self._cache(cache_shapes)
        self._values = self._cache(cache_shapes)
        self._masks = _Masks(ms, self._compute_dtype)
        # What of a row is wanted, for a decoder that is told: see fused_cells.decoder_cell.
        self._logits, self._largest = ms.Tensor(np.zeros(plan.vocab, np.float32)), ms.Tensor([1.0])

    def warm_up(self) -> None:
        """Compiles what will be needed, or reads it from the graph cache. Writes to block 0."""
        zero = np.zeros(1, np.int32)
        fresh = Batch(zero, zero, zero, zero + 1, zero, zero.reshape(1, 1), zero)
        self.run(fresh)
        if self._plan.device == "Ascend":
            self.run(Batch(zero, zero + 1, zero + 1, zero + 1, zero + 1, zero.reshape(1, 1), zero))

    def run(self, batch: Batch) -> Float32 | Chosen:
        """One step; see `StepModel.forward`."""
        tensor = self._ms.Tensor.from_numpy  # shares the memory, which nobody writes to meanwhile
        prefill = self._plan.device == "Ascend" and not batch.context_lens.any()
        self._enter("prefill" if prefill else "increment")
        wanted = batch.logits_rows.size
        # No operator has to take an empty tensor: a step that wants no logits computes one row's.
        rows = batch.logits_rows if wanted else np.zeros(1, np.int32)
        told = self._step.decoder_takes_rows
        out = self._step(
            tensor(batch.token_ids),
            tensor(batch.positions),
            tensor(batch.context_lens + batch.q_seq_lens),
            tensor(batch.context_lens),
            tensor(batch.q_seq_lens),
            tensor(batch.block_tables),
            tensor(batch.slot_mapping),
            self._masks.of(batch, self._plan, prefill=prefill),
            self._keys,
            self._values,
            tensor(rows),
            *((self._largest if batch.greedy else self._logits,) if told else ()),
        )
        values = np.asarray(out.asnumpy(), np.float32).reshape(len(rows), -1)[:wanted]
        return Chosen(values[:, 0].astype(np.int32)) if told and batch.greedy else values

    def _enter(self, phase: str) -> None:
        # MindSpore calls a cell whose phase has one of these two names by a shorter way.
        if phase != self._step.phase:
            self._step.model.add_flags_custom_mcore(phase == "prefill")
            self._step.model.phase = self._step.phase = phase

    def _cache(self, shapes: Sequence[tuple[int, ...]]) -> Any:
        """One tensor a layer, or one for all: as the kernels lay it out."""
        ms = self._ms
        if self._plan.device == "CPU":
            layers = [ms.Tensor.from_numpy(host_memory.zeros(shape)) for shape in shapes]
        else:
            layers = [ms.mint.zeros(shape, dtype=self._compute_dtype) for shape in shapes]
        return ms.mutable(layers)


def _step_cell(model: Any) -> Any:
    """The model and its head as one graph: inputs of `_GIVEN`, then rows [R] -> logits [R, vocab].

    MindFormers' model computes the logits of every row or of each sequence's last; a chunk of a
    prompt wants none. Two graphs would cost MindSpore's way into a graph twice a step.
    """
    import mindspore as ms
    from mindspore import nn, ops

    class Step(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.head = model.model.output_layer
            self.decoder_takes_rows = getattr(model.model.decoder, "takes_rows", False)
            self.gather = ops.Gather()
            self.cast = ops.Cast()

        def construct(
            self,
            ids: Any,
            positions: Any,
            lengths: Any,
            contexts: Any,
            q_lens: Any,
            tables: Any,
            slots: Any,
            mask: Any,
            keys: Any,
            values: Any,
            rows: Any,
            like: Any = None,
        ) -> Any:
            first = (ids, None, positions, lengths, contexts, q_lens, tables, slots, mask, None)
            if self.decoder_takes_rows:  # in the place of padding indices, as what it makes of them
                return self.model(*first, ids, rows, like, None, keys, values)
            hidden = self.model(*first, None, None, None, None, keys, values)
            return self.cast(self.head(self.gather(hidden, rows, 0)), ms.float32)

    model.model.return_hidden_states = True
    model.set_dynamic_inputs()
    step = Step()
    inputs = [model.get_inputs()[place] for place in _GIVEN]
    inputs.append(ms.Tensor(shape=[None], dtype=ms.int32))
    if step.decoder_takes_rows:
        inputs.append(ms.Tensor(shape=[None], dtype=ms.float32))
    step.set_inputs(*inputs)
    return step


class _Masks:
    """What Ascend's attention operators expect, as MindFormers and vllm-mindspore make it."""

    def __init__(self, ms: Any, dtype: Any) -> None:
        self._ms = ms
        self._dtype = dtype
        ones = np.triu(np.ones((128, 128), np.float32), 1)
        # FlashAttentionScore takes a boolean-like 1.0 in bfloat16, an addend in other dtypes.
        self._prefill = ms.Tensor(ones * (1.0 if dtype == ms.bfloat16 else -10000.0), dtype)
        self._none = ms.Tensor(np.zeros((1, 1), np.float32), dtype)

    def of(self, batch: Batch, plan: ModelPlan, *, prefill: bool) -> Any:
        """[128, 128] for prefill, [1, 1] where no row may see the future, else [T, tokens]."""
        if prefill:
            return self._prefill
        if plan.device == "CPU" or int(batch.q_seq_lens.max()) == 1:
            return self._none
        columns = np.arange(batch.block_tables.shape[1] * plan.block_size, dtype=np.int32)
        future = columns[None, :] > batch.positions[:, None]
        return self._ms.Tensor(future * np.float32(-10000.0), self._dtype)
