"""CPU cells with the constructors and call keywords of MindFormers' own, in float32.

MindSpore is imported when a function is called: a cell class needs its base class. `construct`'s
first parameter must be called `self`, and MindSpore compiles the methods from their source.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


def custom_operator(library: Path, symbol: str, inputs: Sequence[str]) -> Any:
    """A C++ operator with float32 output and dynamic shapes; `inputs`: "f32", "i32" or "i64" each.

    Only this combination does (MindSpore 2.9): dtype_format, target CPU, no paramType, and both
    out_shape and out_dtype None, with <symbol>InferShape and <symbol>InferType in the library.
    """
    from mindspore import ops
    from mindspore.ops import CustomRegOp, DataType

    kinds = {"f32": DataType.F32_Default, "i32": DataType.I32_Default, "i64": DataType.I64_Default}
    registration = CustomRegOp(symbol)
    for index in range(len(inputs)):
        registration = registration.input(index, f"x{index}")
    dtypes = [kinds[kind] for kind in inputs] + [kinds["f32"]]
    info = registration.output(0, "y").dtype_format(*dtypes).target("CPU").get_op_info()
    return ops.Custom(
        f"{library}:{symbol}", out_shape=None, out_dtype=None, func_type="aot", reg_info=info
    )


@lru_cache(maxsize=1)
def rms_norm_cell() -> type[Any]:
    """RMSNorm without the RmsNorm operator, which has no CPU kernel."""
    from mindformers.parallel_core.inference.transformer.norm import RMSNorm
    from mindspore import ops

    class CpuRMSNorm(RMSNorm):  # type: ignore[misc]  # MindFormers ships no types
        def construct(self, x: Any) -> Any:
            return x * ops.rsqrt(ops.mean(x * x, -1, True) + self.eps) * self.weight

    return CpuRMSNorm


def rotary_cell(head_dim: int) -> Any:
    """Half-split rotary embedding without ApplyRotaryPosEmb, which has no CPU kernel.

    query [T, heads * D], key [T, kv_heads * D]; cos and sin [T, D], gathered by position.
    """
    from mindspore import nn, ops

    class CpuRotary(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(self) -> None:
            super().__init__()
            self.dim = head_dim
            self.half = head_dim // 2

        def construct(self, query: Any, key: Any, cos: Any, sin: Any, seq_lens: Any) -> Any:
            rows = query.shape[0]
            c = cos.reshape(rows, 1, self.dim)
            s = sin.reshape(rows, 1, self.dim)
            q = query.reshape(rows, -1, self.dim)
            k = key.reshape(rows, -1, self.dim)
            q = q * c + ops.concat((-q[..., self.half :], q[..., : self.half]), -1) * s
            k = k * c + ops.concat((-k[..., self.half :], k[..., : self.half]), -1) * s
            return q.reshape(rows, -1), k.reshape(rows, -1)

    return CpuRotary()


def compiled_attention_cell(library: Path) -> type[Any]:
    """The compiled ragged paged attention in the place of MindFormers' FlashAttention."""
    from mindspore import nn

    class CompiledAttention(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(self, head_num: int, head_dim: int | None = None, **_: Any) -> None:
            super().__init__()
            self.is_prefill = True
            self.operator = custom_operator(library, "PagedAttention", ["f32"] * 5 + ["i32"] * 4)

        def construct(
            self,
            query: Any,
            key: Any,
            value: Any,
            slot_mapping: Any = None,
            block_tables: Any = None,
            batch_valid_length: Any = None,
            context_lens_tensor: Any = None,
            q_seq_lens: Any = None,
            actual_seq_qlen: Any = None,
            actual_seq_kvlen: Any = None,
            attn_mask: Any = None,
            padding_mask: Any = None,
            prefix: Any = None,
            key_cache: Any = None,
            value_cache: Any = None,
        ) -> Any:
            return self.operator(
                query,
                key,
                value,
                key_cache,
                value_cache,
                slot_mapping,
                block_tables,
                q_seq_lens,
                batch_valid_length,
            )

    return CompiledAttention
