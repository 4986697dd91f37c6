"""The echo as a StepModel: it reads the prompt back out of a paged cache, never from memory.

The cache keeps for each slot the token written there and where in its sequence the prompt ended, as
far as is known there. An error in block tables, slot mapping, prefix cache, chunking or preemption
therefore shows in the text.
"""

from __future__ import annotations

import time

import numpy as np

from mindstream.backends.echo.vocabulary import vocabulary_of
from mindstream.backends.engine.step_model import Batch, Float32, Int32
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment

_NOTHING = -1
_SURE = 100.0  # logit of the one token; the others' are 0


class EchoStepModel:
    """Token number n of the output is token number n of the prompt, then comes the end token."""

    def __init__(self, deployment: Deployment) -> None:
        self._serving = deployment.serving
        self._vocabulary = vocabulary_of(deployment)
        self._block_size = self._serving.echo.block_size
        slots = self._serving.echo.num_blocks * self._block_size
        self._tokens: Int32 = np.full(slots, _NOTHING, np.int32)
        self._prompt_ends: Int32 = np.full(slots, _NOTHING, np.int32)  # position of its last token

    def load(self) -> Limits:
        """See `StepModel.load`; there is nothing to load."""
        echo, serving = self._serving.echo, self._serving
        return Limits(
            vocab_size=self._vocabulary.width,
            max_seq_len=serving.max_seq_len or echo.num_blocks * echo.block_size,
            max_batch_size=serving.max_batch_size,
            block_size=echo.block_size,
            num_blocks=echo.num_blocks,
        )

    def forward(self, batch: Batch) -> Float32:
        """See `StepModel.forward`. Raises ValueError for a prompt whose end is not marked."""
        if self._serving.echo.delay_ms:
            time.sleep(self._serving.echo.delay_ms / 1000)
        owners = np.repeat(np.arange(len(batch.q_seq_lens)), batch.q_seq_lens)
        self._write(batch)
        rows = batch.logits_rows
        chosen = self._next_tokens(batch, owners[rows], batch.positions[rows])
        logits = np.zeros((len(rows), self._vocabulary.width), np.float32)
        logits[np.arange(len(rows)), chosen] = _SURE
        return logits

    def close(self) -> None:
        """Nothing to free."""

    def _write(self, batch: Batch) -> None:
        self._tokens[batch.slot_mapping] = batch.token_ids
        known = self._known_prompt_ends(batch)
        begins = np.concatenate(([0], np.cumsum(batch.q_seq_lens)[:-1]))
        marked = np.where(batch.token_ids >= self._vocabulary.size, batch.positions, _NOTHING)
        marked[begins] = np.maximum(marked[begins], known)
        for begin, count in zip(begins, batch.q_seq_lens, strict=True):
            if count > 1:  # what one row knows, those behind it know too
                chunk = slice(begin, begin + count)
                marked[chunk] = np.maximum.accumulate(marked[chunk])
        self._prompt_ends[batch.slot_mapping] = marked

    def _known_prompt_ends(self, batch: Batch) -> Int32:
        """[B] what the cache says about the token before each sequence's new ones."""
        before = batch.context_lens - 1
        slots = self._slots(batch, np.arange(len(before)), np.maximum(before, 0))
        return np.where(before >= 0, self._prompt_ends[slots], _NOTHING)

    def _next_tokens(self, batch: Batch, owners: Int32, positions: Int32) -> Int32:
        ends = self._prompt_ends[self._slots(batch, owners, positions)]
        if (ends < 0).any():
            raise ValueError("a sequence has no marked end of its prompt")
        wanted = positions - ends
        tokens = self._tokens[self._slots(batch, owners, np.minimum(wanted, ends))]
        tokens = np.where(tokens >= self._vocabulary.size, tokens - self._vocabulary.size, tokens)
        return np.where(wanted > ends, self._vocabulary.end, tokens)

    def _slots(self, batch: Batch, owners: Int32, positions: Int32) -> Int32:
        slots: Int32 = batch.block_tables[owners, positions // self._block_size] * self._block_size
        slots += positions % self._block_size
        return slots
