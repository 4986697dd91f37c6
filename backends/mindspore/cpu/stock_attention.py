"""Ragged paged attention of MindSpore's own operators, for machines without compiled kernels.

The cache is a pair of Parameters of each attention cell, because the stock operators that write in
place take nothing else. Every row is scored against the gathered blocks of all sequences and
masked: no shape depends on a value, at the price of work that grows with the batch.
"""

from __future__ import annotations

from typing import Any


def stock_attention_cell() -> type[Any]:
    """A cell class with the constructor and call keywords of MindFormers' FlashAttention."""
    from mindspore import Parameter, Tensor, nn, ops
    from mindspore import dtype as mstype

    class StockAttention(nn.Cell):  # type: ignore[misc]  # MindSpore ships no types
        def __init__(
            self,
            head_num: int,
            head_dim: int,
            kv_head_num: int,
            keep_prob: float = 1.0,
            scale_value: float = 1.0,
            **_: Any,
        ) -> None:
            super().__init__()
            self.is_prefill = True
            self.dim = head_dim
            self.kv_heads = kv_head_num
            self.group = head_num // kv_head_num
            self.scale = scale_value
            self.block_size = 1
            self.scatter = ops.ScatterUpdate()
            self.scores = ops.BatchMatMul(transpose_b=True)
            self.context = ops.BatchMatMul()
            self.lowest = Tensor(-1e30, mstype.float32)

        def allocate(self, num_blocks: int, block_size: int, kv_heads: int) -> None:
            """Makes the cache: [num_blocks, block_size, kv_heads * head_dim] twice, float32."""
            shape = (num_blocks * block_size, kv_heads * self.dim)
            self.block_size = block_size
            self.keys = Parameter(ops.zeros(shape, mstype.float32), "keys", requires_grad=False)
            self.values = Parameter(ops.zeros(shape, mstype.float32), "values", requires_grad=False)

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
            rows = query.shape[0]
            keys = self.scatter(self.keys, slot_mapping, key)
            values = self.scatter(self.values, slot_mapping, value)
            # Slots of all blocks in the tables; padding reads block 0 and is masked below.
            width = block_tables.shape[1] * self.block_size
            blocks = ops.maximum(block_tables, 0).reshape(-1, 1) * self.block_size
            slots = (blocks + ops.arange(0, self.block_size).astype(mstype.int32)).reshape(-1)
            k = keys[slots].reshape(-1, self.kv_heads, self.dim).transpose(1, 0, 2)
            v = values[slots].reshape(-1, self.kv_heads, self.dim).transpose(1, 0, 2)
            # The sequence and the position of every row.
            ends = ops.cumsum(q_seq_lens, 0).astype(mstype.int32)
            row = ops.arange(0, rows).astype(mstype.int32).reshape(-1, 1)
            owner = (row >= ends.reshape(1, -1)).astype(mstype.int32).sum(-1)
            position = row.reshape(-1) - ends[owner] + batch_valid_length[owner]
            column = ops.arange(0, slots.shape[0]).astype(mstype.int32).reshape(1, -1)
            start = owner.reshape(-1, 1) * width
            visible = ops.logical_and(column >= start, column <= start + position.reshape(-1, 1))
            # [kv_heads, rows * group, D] against [kv_heads, slots, D]
            q = query.reshape(rows, self.kv_heads, self.group, self.dim).transpose(1, 0, 2, 3)
            q = q.reshape(self.kv_heads, -1, self.dim)
            scores = self.scores(q, k) * self.scale
            scores = scores.reshape(self.kv_heads, rows, self.group, -1)
            scores = ops.select(
                ops.broadcast_to(visible.reshape(1, rows, 1, -1), scores.shape),
                scores,
                ops.broadcast_to(self.lowest, scores.shape),
            )
            weights = ops.softmax(scores, -1).reshape(self.kv_heads, rows * self.group, -1)
            out = self.context(weights, v).reshape(self.kv_heads, rows, self.group, self.dim)
            return out.transpose(1, 0, 2, 3).reshape(rows, -1)

    return StockAttention
