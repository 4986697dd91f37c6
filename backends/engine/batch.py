"""Turns scheduled sequences into the flat arrays of a `Batch`, in time that does not grow with
their length.

Every running sequence owns a row of one wide block table, which changes only when it gets a block.
"""

from __future__ import annotations

import numpy as np

from mindstream.backends.engine.sequence import Sequence
from mindstream.backends.engine.step_model import Batch, Int32

_PAD = -1


class BatchBuilder:
    """Block-table rows for `max_batch_size` sequences; the table widens as sequences grow."""

    def __init__(self, max_batch_size: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables: Int32 = np.full((max_batch_size, 16), _PAD, np.int32)
        self._lengths = [0] * max_batch_size  # blocks each row shows
        self._unused = list(range(max_batch_size - 1, -1, -1))

    def join(self, sequence: Sequence) -> None:
        """Gives the sequence a row."""
        sequence.row = self._unused.pop()

    def leave(self, sequence: Sequence) -> None:
        """Takes the row back."""
        row = sequence.row
        self._tables[row, : self._lengths[row]] = _PAD
        self._lengths[row] = 0
        self._unused.append(row)
        sequence.row = -1

    def sync(self, sequence: Sequence) -> None:
        """Copies the blocks the sequence got since the last call into its row."""
        row, blocks = sequence.row, sequence.blocks
        if len(blocks) > self._tables.shape[1]:
            self._widen(len(blocks))
        shown = self._lengths[row]
        self._tables[row, shown : len(blocks)] = blocks[shown:]
        self._lengths[row] = len(blocks)

    def _widen(self, width: int) -> None:
        height, old = self._tables.shape
        tables = np.full((height, max(width, 2 * old)), _PAD, np.int32)
        tables[:, :old] = self._tables
        self._tables = tables

    def build(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> Batch:
        """Decodes first, one row each, then `(sequence, new tokens)` of every prompt chunk.

        A sequence's logits row is wanted when the step reaches the end of its tokens.
        """
        token_ids = [s.tokens[-1] for s in decodes]
        contexts = [s.computed for s in decodes]
        rows = [s.row for s in decodes]
        counts = [1] * len(decodes)
        positions, owners = list(contexts), list(range(len(decodes)))
        wanted = list(range(len(decodes)))
        greedy = all(s.request.sampling.takes_largest for s in decodes)
        for sequence, count in chunks:
            start = sequence.computed
            owners += [len(rows)] * count
            token_ids += sequence.tokens[start : start + count]
            positions += range(start, start + count)
            contexts.append(start)
            rows.append(sequence.row)
            counts.append(count)
            if start + count == len(sequence.tokens):
                wanted.append(len(token_ids) - 1)
                greedy = greedy and sequence.request.sampling.takes_largest
        return self._arrays(token_ids, positions, owners, rows, counts, contexts, wanted, greedy)

    def _arrays(
        self,
        token_ids: list[int],
        positions: list[int],
        owners: list[int],
        rows: list[int],
        counts: list[int],
        contexts: list[int],
        wanted: list[int],
        greedy: bool,
    ) -> Batch:
        width = max(self._lengths[row] for row in rows)
        tables = self._tables[rows, :width]
        where = np.array(positions, np.int32)
        slots = tables[owners, where // self._block_size] * self._block_size
        slots += where % self._block_size
        return Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=where,
            slot_mapping=slots,
            q_seq_lens=np.array(counts, np.int32),
            context_lens=np.array(contexts, np.int32),
            block_tables=tables,
            logits_rows=np.array(wanted, np.int32),
            greedy=greedy,
        )
