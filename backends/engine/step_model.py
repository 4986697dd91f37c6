"""The lower seam: what a device must do for one ragged batch. Blocking; one engine thread calls it.

Sequences of a batch lie behind each other without padding: sequence b owns `q_seq_lens[b]` rows of
the flat arrays, one for a decode, many for a prompt or a chunk of one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import Deployment

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. T: rows (new tokens) in all; B: sequences; W: widest block table; R: logits rows.

    slot_mapping[t] = block_id * block_size + offset of row t in the KV cache.
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    slot_mapping: Int32  # [T]
    q_seq_lens: Int32  # [B] new tokens of each sequence, >= 1
    context_lens: Int32  # [B] tokens already in the cache
    block_tables: Int32  # [B, W] padded with -1
    logits_rows: Int32  # [R] ascending rows in [0, T) whose logits are wanted; may be empty
    greedy: bool = False  # of each of these rows the id of the largest logit is enough


@dataclass(frozen=True, slots=True)
class Chosen:
    """The tokens of a greedy batch, from a model that need not hand out its logits for them.

    ids [R]: of each row's largest logit, the lowest of equals; -1 for a row that has a NaN, or
    nothing above -inf.
    """

    ids: Int32


def logits_of(output: Float32 | Chosen) -> Float32:
    """What `forward` gave for a batch that is not greedy. Raises TypeError if it has chosen."""
    if isinstance(output, Chosen):
        raise TypeError("forward() chose the tokens of a batch that is not greedy")
    return output


class StepModel(Protocol):
    """A model on a device. Every call, `load` included, comes from the same thread."""

    def load(self) -> Limits:
        """Reads weights, allocates the KV cache, compiles. Raises ConfigError if it cannot."""

    def forward(self, batch: Batch) -> Float32 | Chosen:
        """Writes K and V of the new rows into the cache; returns logits [R, vocab], float32.

        A row's result does not depend on what else is in the batch. For a greedy batch a model may
        choose instead.
        """

    def close(self) -> None:
        """Frees the device. Idempotent."""


StepModelFactory = Callable[[Deployment], StepModel]
