"""Cells that run the fused operator in the place of MindFormers' embedding, decoder and head.

They have the constructor and call keywords of the cells they replace. One operator computes a step
from token ids to logits, for MindSpore takes some 0.1 ms for each: the decoder runs it, embedding
and head do nothing. The number of the model inside the kernel library is the one parameter. Engine
thread only; MindSpore is imported when a function is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mindstream.backends.mindspore.cpu.cells import custom_operator


def _number(handle: int) -> Any:
    """A parameter, not a constant: a cached graph must not keep the number of another process."""
    from mindspore import Parameter, Tensor

    return Parameter(Tensor(np.array([handle], np.int64)), "fused_model", requires_grad=False)


def embedding_cell(handle: int) -> Any:
    """In the place of LanguageModelEmbedding; what it gives is not read."""
    from mindspore import Tensor, nn

    class Tied(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        """MindFormers hands this weight to a tied head, which has no use for it."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = _number(handle)

    class NoEmbedding(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(self) -> None:
            super().__init__()
            self.nothing = Tensor(np.zeros((1, 1), np.float32))
            self.word_embeddings = Tied()

        def construct(self, input_ids: Any) -> Any:
            return self.nothing

    return NoEmbedding()


def head_cell() -> Any:
    """In the place of the output ColumnParallelLinear, which is not called."""
    from mindspore import nn

    return nn.Cell()


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
    """The whole model, in the place of TransformerBlock: token ids [T] -> logits [R, vocab], or the
    id of each row's largest logit [R, 1], exact in float32: -1 where the sampler would refuse.

    key_cache and value_cache are lists of one tensor each, which the operator writes in place;
    rotary_pos_cos and rotary_pos_sin are what `rotary_tables_cell` gives. Three arguments that
    MindFormers hands through, and that have no use here, hold what it has no argument for:
    attn_padding_idx the token ids, attn_unpadding_idx the rows [R] that are wanted, and
    ffn_padding_idx what of them: [vocab] zeros for logits, [1] one for ids.
    """
    from mindspore import nn

    class Flags(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        """MindFormers sets flags on each layer's attention and counts the layers for the cache."""

        def __init__(self, depth: int) -> None:
            super().__init__()
            if depth:
                self.self_attention = Flags(depth - 1)
                self.core_attention = self.self_attention

    class FusedModel(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        takes_rows = True

        def __init__(self) -> None:
            super().__init__()
            self.model = _number(handle)
            self.layers = nn.CellList([Flags(2)])
            inputs = ["i64", "f32", "f32", "f32", *["i32"] * 7, "f32", "f32"]
            self.operator = custom_operator(library, "LanguageModel", inputs)

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
                ffn_padding_idx,
                rotary_pos_cos[0],
                rotary_pos_cos[1],
                attn_padding_idx,
                rotary_pos_sin,
                slot_mapping,
                block_tables,
                q_seq_lens,
                batch_valid_length,
                attn_unpadding_idx,
                key_cache[0],
                value_cache[0],
            )

    return FusedModel()
