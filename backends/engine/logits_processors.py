"""What is done to one row of logits before the draw. Pure functions of one row; the engine thread.

Each works on its row alone, so a row's result is the same bits whatever else is in the batch.
A set that is cut in the middle of equal values keeps the lower token ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mindstream.backends.engine.step_model import Float32
from mindstream.plugin.watermark import WatermarkKey

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]

# With more candidates than this, a histogram and a sort of one bin are cheaper than the sort.
_SORT_LIMIT = 1024
_BINS_A_NAT = 16
_LAST_BIN = 4095
_GROUP = 64


def penalise_repetition(logits: Float32, token_ids: ArrayLike, penalty: float) -> Float32:
    """A copy of [V] with the logits of `token_ids` divided by `penalty`, or times it where < 0.

    Source of the rule: Keskar et al., "CTRL" (2019), with the sign fix that every server uses.
    An id that occurs twice is penalised once.
    """
    seen = np.asarray(token_ids)
    values = logits[seen].astype(np.float64)
    result = logits.copy()
    with np.errstate(over="ignore"):  # a tiny penalty may leave float32: infinity is right then
        result[seen] = np.where(values < 0, values * penalty, values / penalty)
    return result


def contenders(scores: Float32, count: int, margin: float) -> Int64:
    """Ids, ascending, of every token of [V] that can be among the best `count` after a boost.

    A boost adds something in [0, `margin`] to each token. With margin 0 these are the best `count`
    and perhaps a few more. Never sorts, and looks at the whole vocabulary three times at most.
    """
    size = len(scores)
    if count >= size:
        return np.arange(size)
    groups = size // _GROUP
    if count == 1:
        floor = scores.max()
    elif groups >= 2 * count:
        # The best of each group are tokens too, so their count-th best is not above the real one.
        heads = scores[: groups * _GROUP].reshape(_GROUP, groups).max(axis=0)
        floor = np.partition(heads, groups - count)[groups - count]
    else:
        floor = np.partition(scores, size - count)[size - count]
    # One step down: the subtraction must not round a token out.
    floor = np.nextafter(np.float32(float(floor) - margin), np.float32(-np.inf))
    return np.flatnonzero(scores >= floor)


def green_mask(key: WatermarkKey, previous_id: int, token_ids: Int64) -> Bool:
    """`key.is_green(previous_id, t)` for each t of [N]."""
    z = token_ids.astype(np.uint64)
    z += np.uint64(1)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key.context_seed(previous_id))
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z < np.uint64(key.threshold)


def add_watermark(
    scores: Float64, token_ids: Int64, previous_id: int, key: WatermarkKey, eos_token_ids: ArrayLike
) -> Float64:
    """[N] scores of the candidates `token_ids` with `key.delta` added to the green ones.

    A token that ends the text is neither green nor red: it gets what keeps its probability, because
    a text must not end early, or run on, for the sake of its watermark.
    """
    green = green_mask(key, previous_id, token_ids)
    boosted = scores + key.delta * green
    ends = np.isin(token_ids, np.asarray(eos_token_ids, dtype=np.int64))
    if ends.any():
        weights = np.where(ends, 0.0, np.exp(scores - scores.max()))
        before = weights.sum()
        after = before + np.expm1(key.delta) * weights[green].sum()
        boosted[ends] = scores[ends] + (np.log(after / before) if before > 0 else 0.0)
    return boosted


def top_k(scores: Float64, count: int) -> Int64:
    """Indices, ascending, of the best `count` of [N]; all of them if there are fewer."""
    size = len(scores)
    if count >= size:
        return np.arange(size)
    edge = np.partition(scores, size - count)[size - count]
    above = np.flatnonzero(scores > edge)
    ties = np.flatnonzero(scores == edge)[: count - len(above)]
    return np.sort(np.concatenate((above, ties)))


def softmax(scores: Float64, temperature: float) -> Float64:
    """Probabilities of [N] finite or -inf scores, at least one of them finite."""
    weights: Float64 = scores - scores.max()
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature: -inf is the limit
            weights /= temperature
    np.exp(weights, out=weights)
    weights /= weights.sum()
    return weights


def top_p(probabilities: Float64, mass: float) -> Int64:
    """Indices, ascending, of the fewest most probable tokens that hold at least `mass`.

    Nucleus sampling: Holtzman et al., "The Curious Case of Neural Text Degeneration" (ICLR 2020).
    """
    return _smallest_set(_surprise(probabilities), probabilities, mass)


def typical_p(probabilities: Float64, mass: float) -> Int64:
    """Indices, ascending, of the fewest tokens that hold `mass`, the most typical first.

    Typical is a surprise (-log p) near the entropy: Meister et al., "Locally Typical Sampling"
    (TACL 2023).
    """
    surprise = _surprise(probabilities)
    possible = probabilities > 0
    entropy = (probabilities[possible] * surprise[possible]).sum()
    return _smallest_set(np.abs(surprise - entropy), probabilities, mass)


def _surprise(probabilities: Float64) -> Float64:
    with np.errstate(divide="ignore"):
        surprise: Float64 = np.log(probabilities)
    return np.negative(surprise, out=surprise)


def _smallest_set(key: Float64, probabilities: Float64, mass: float) -> Int64:
    """Indices, ascending, of the shortest run in the order of `key` (>= 0) that reaches `mass`."""
    goal = mass * probabilities.sum()
    if len(key) <= _SORT_LIMIT:
        return np.sort(_shortest_run(np.arange(len(key)), key, probabilities, goal))
    scaled = key * _BINS_A_NAT
    bins = np.minimum(scaled, _LAST_BIN, out=scaled).astype(np.intp)
    reached = np.cumsum(np.bincount(bins, weights=probabilities))
    edge = int(np.searchsorted(reached, goal))  # whole bins before it are in; only it is sorted
    if edge > 0:
        goal -= reached[edge - 1]
    inside = bins < edge
    inside[_shortest_run(np.flatnonzero(bins == edge), key, probabilities, goal)] = True
    return np.flatnonzero(inside)


def _shortest_run(ids: Int64, key: Float64, probabilities: Float64, goal: float) -> Int64:
    """The first of `ids` in the order of `key` that reach `goal`, at least one; all if none do."""
    order = ids[np.argsort(key[ids], kind="stable")]
    last = int(np.searchsorted(np.cumsum(probabilities[order]), goal))
    return order[: last + 1]
