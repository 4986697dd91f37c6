"""Cells that run the fused operators in the place of MindFormers' embedding, decoder and head.

They have the constructor and call keywords of the cells they replace, and no weights of their own:
the number of the model inside the kernel library is their one parameter. Engine thread only;
MindSpore is imported when a function is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def _operator(library: Path, symbol: str, inputs: str) -> Any:
    """A C++ operator with float32 output; a letter an input: l int64, f float32, i int32."""
    from mindspore import ops
    from mindspore.ops import CustomRegOp, DataType

    kinds = {"l": DataType.I64_Default, "f": DataType.F32_Default, "i": DataType.I32_Default}
    registration = CustomRegOp(symbol)
    for index in range(len(inputs)):
        registration = registration.input(index, f"x{index}")
    dtypes = [kinds[letter] for letter in inputs + "f"]
    info = registration.output(0, "y").dtype_format(*dtypes).target("CPU").get_op_info()
    return ops.Custom(
        f"{library}:{symbol}", out_shape=None, out_dtype=None, func_type="aot", reg_info=info
    )


def _number(handle: int) -> Any:
    """A parameter, not a constant: a cached graph must not keep the number of another process."""
    from mindspore import Parameter, Tensor

    return Parameter(Tensor(np.array([handle], np.int64)), "fused_model", requires_grad=False)


def _like(width: int) -> Any:
    """Tells an operator the width and type of its output; the values are not read."""
    from mindspore import Tensor

    return Tensor(np.zeros(width, np.float32))


def embedding_cell(library: Path, handle: int, hidden: int) -> Any:
    """token ids [T] -> [T, hidden], in the place of LanguageModelEmbedding."""
    from mindspore import nn

    class Tied(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        """MindFormers hands this weight to a tied head, which has no use for it."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = _number(handle)

    class FusedEmbedding(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(self) -> None:
            super().__init__()
            self.model = _number(handle)
            self.like = _like(hidden)
            self.operator = _operator(library, "TokenEmbedding", "lfi")
            self.word_embeddings = Tied()

        def construct(self, input_ids: Any) -> Any:
            return self.operator(self.model, self.like, input_ids)

    return FusedEmbedding()


def head_cell(library: Path, handle: int, vocab: int) -> Any:
    """hidden [T, hidden], rows [R] -> logits [R, vocab], for the output ColumnParallelLinear."""
    from mindspore import nn

    class FusedHead(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        takes_rows = True

        def __init__(self) -> None:
            super().__init__()
            self.model = _number(handle)
            self.like = _like(vocab)
            self.operator = _operator(library, "VocabHead", "lffi")

        def construct(self, hidden: Any, rows: Any) -> Any:
            return self.operator(self.model, self.like, hidden, rows)

    return FusedHead()


def rotary_tables_cell(cos: Any, sin: Any) -> Any:
    """In the place of RotaryEmbedding: the decoder gets tables [P, D] and positions [T]."""
    from mindspore import nn

    class RotaryTables(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(self) -> None:
            super().__init__()
            self.cos = cos
            self.sin = sin

        def get_cos_sin_for_decode(self, positions: Any) -> Any:
            """What MindFormers' model hands on as rotary_pos_cos and rotary_pos_sin."""
            return (self.cos, self.sin), positions

        def get_cos_sin_for_prefill(self) -> Any:
            raise NotImplementedError("on CPU no step is a prefill of its own")

    return RotaryTables()


def decoder_cell(library: Path, handle: int) -> Any:
    """All layers and the final norm, in the place of TransformerBlock.

    key_cache and value_cache are lists of one tensor each, which the operator writes in place;
    rotary_pos_cos and rotary_pos_sin are what `rotary_tables_cell` gives. attn_unpadding_idx, which
    MindFormers hands through and has no use for here, holds the rows [R] that the head will read.
    """
    from mindspore import nn

    class Flags(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        """MindFormers sets flags on each layer's attention and counts the layers for the cache."""

        def __init__(self, depth: int) -> None:
            super().__init__()
            if depth:
                self.self_attention = Flags(depth - 1)
                self.core_attention = self.self_attention

    class FusedDecoder(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(self) -> None:
            super().__init__()
            self.model = _number(handle)
            self.layers = nn.CellList([Flags(2)])
            self.operator = _operator(library, "DecoderStack", "lfffiiiiiiff")

        def construct(
            self,
            hidden_states: Any,
            attention_mask: Any = None,
            rotary_pos_cos: Any = None,
            rotary_pos_sin: Any = None,
            batch_valid_length: Any = None,
            context_lens_tensor: Any = None,
            q_seq_lens: Any = None,
            block_tables: Any = None,
            slot_mapping: Any = None,
            attn_padding_idx: Any = None,
            attn_unpadding_idx: Any = None,
            ffn_padding_idx: Any = None,
            ffn_unpadding_idx: Any = None,
            key_cache: Any = None,
            value_cache: Any = None,
            q_seq_lens_cpu: Any = None,
            batch_valid_length_cpu: Any = None,
            context_lens_tensor_cpu: Any = None,
        ) -> Any:
            return self.operator(
                self.model,
                hidden_states,
                rotary_pos_cos[0],
                rotary_pos_cos[1],
                rotary_pos_sin,
                slot_mapping,
                block_tables,
                q_seq_lens,
                batch_valid_length,
                attn_unpadding_idx,
                key_cache[0],
                value_cache[0],
            )

    return FusedDecoder()
