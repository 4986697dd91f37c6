"""Logits to token ids. The engine thread calls it once a step.

Order: repetition penalty, watermark, temperature, top_k, top_p, typical_p, draw. The watermark
comes before what cuts, as in its authors' code: a green token can then enter the set, so the mark
is as strong under a small top_k or top_p as without, and sampling with top_k 1 is greedy decoding,
marked or not. Each cut renormalises what it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindstream.backends.engine import logits_processors as processors
from mindstream.backends.engine.logits_processors import Float64, Int64
from mindstream.backends.engine.random_stream import uniform
from mindstream.backends.engine.step_model import Float32
from mindstream.plugin.request import SamplingParams
from mindstream.plugin.watermark import WatermarkKey


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Whose token is drawn from one row of logits.

    `token_ids` is prompt and output so far, at least one id; a NumPy array or an `array.array` is
    read without a copy. `index` counts the tokens generated before this one, those of earlier
    attempts included.
    """

    params: SamplingParams
    token_ids: Sequence[int] | NDArray[np.integer[Any]]
    index: int
    eos_token_ids: tuple[int, ...] = ()  # the watermark leaves their probability alone


class Sampler:
    """Chooses the next token of each row, from that row alone: batch invariant by construction."""

    def __init__(self, watermark: WatermarkKey | None) -> None:
        self._key = watermark

    def sample(self, logits: Float32, rows: Sequence[SampleRow]) -> list[int]:
        """One token id for each row of `logits` [R, V], which is left unchanged.

        Raises ValueError if a row has a NaN, or nothing above -inf. Tokens at +inf share the draw
        evenly; greedy decoding takes the lowest id of equals.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sequences")
        return [self._choose(scores, row) for scores, row in zip(logits, rows, strict=True)]

    def distribution(self, logits: Float32, row: SampleRow) -> tuple[Int64, Float64]:
        """What the token of one row [V] is drawn from: [N] ids, ascending, and probabilities.

        One id for greedy decoding. Raises as `sample`.
        """
        params = row.params
        scores = logits
        if params.repetition_penalty != 1.0:
            scores = processors.penalise_repetition(
                scores, row.token_ids, params.repetition_penalty
            )
        if params.greedy:
            return self._best(scores, row), np.ones(1)
        ids, values = self._candidates(scores, row, params.top_k or len(scores))
        return _cut(ids, values, params)

    def _choose(self, logits: Float32, row: SampleRow) -> int:
        ids, chances = self.distribution(logits, row)
        if len(ids) == 1:
            return int(ids[0])
        # The number-quantile in the order of ids. `right` skips tokens of probability 0, and a
        # number below 1 keeps the product below the last entry.
        cumulative = np.cumsum(chances)
        number = uniform(row.params.seed, row.index) * cumulative[-1]
        return int(ids[np.searchsorted(cumulative, number, side="right")])

    def _best(self, scores: Float32, row: SampleRow) -> Int64:
        if row.params.watermark:
            ids, values = self._candidates(scores, row, 1)
            return ids[[values.argmax()]]
        best = scores.argmax()  # a NaN's place if there is one
        _check(float(scores[best]))
        return np.array([best])

    def _candidates(self, scores: Float32, row: SampleRow, count: int) -> tuple[Int64, Float64]:
        """Ids, ascending, and marked scores of the tokens that can be among the best `count`."""
        best = float(scores.max())  # NaN if there is one
        _check(best)
        key = self._key if row.params.watermark else None
        if row.params.watermark and key is None:
            raise ValueError("a request asks for a watermark, and this sampler has no key")
        ids = processors.contenders(scores, count, key.delta if key else 0.0)
        values = (scores if len(ids) == len(scores) else scores[ids]).astype(np.float64)
        if best == np.inf:
            values = np.where(values == np.inf, 0.0, -np.inf)
        if key is not None:
            previous = int(row.token_ids[-1])
            values = processors.add_watermark(values, ids, previous, key, row.eos_token_ids)
        return ids, values


def _check(best: float) -> None:
    if not best > -np.inf:
        raise ValueError(f"the largest logit of a row is {best}: the model's output is not usable")


def _cut(ids: Int64, values: Float64, params: SamplingParams) -> tuple[Int64, Float64]:
    if params.top_k:
        kept = processors.top_k(values, params.top_k)
        ids, values = ids[kept], values[kept]
    chances = processors.softmax(values, params.temperature)
    if params.top_p < 1.0:
        kept = processors.top_p(chances, params.top_p)
        ids, chances = ids[kept], chances[kept] / chances[kept].sum()
    if params.typical_p is not None and params.typical_p < 1.0:
        kept = processors.typical_p(chances, params.typical_p)
        ids, chances = ids[kept], chances[kept] / chances[kept].sum()
    return ids, chances
