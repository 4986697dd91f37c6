"""Each processor against transformers' (committed values) and against its definition."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from mindstream.backends.engine import logits_processors as processors
from mindstream.backends.engine.sampler import Sampler, SampleRow
from mindstream.plugin.request import SamplingParams

Float64 = NDArray[np.float64]

REFERENCE = json.loads(Path(__file__).with_name("reference.json").read_text(encoding="utf-8"))
CASES = [
    pytest.param(row, case, id=f"{len(row['logits_times_1024'])}-{case['params']}")
    for row in REFERENCE["rows"]
    for case in row["cases"]
]


@pytest.mark.parametrize(("row", "case"), CASES)
def test_the_distribution_is_that_of_transformers(
    row: dict[str, Any], case: dict[str, Any]
) -> None:
    logits = np.array(row["logits_times_1024"], dtype=np.float32) / 1024
    params = SamplingParams(do_sample=True, **case["params"])
    ids, chances = Sampler(None).distribution(logits, SampleRow(params, row["token_ids"], 0))
    expected = range(len(logits)) if case["ids"] == "all" else case["ids"]
    assert ids.tolist() == list(expected)
    # float32 rounds the penalised logits; the rest is float64.
    np.testing.assert_allclose(chances[:: case["step"]], case["probabilities"], rtol=2e-6)
    assert chances.sum() == pytest.approx(1.0, abs=1e-12)


scores64 = arrays(
    np.float64,
    st.integers(1, 60),
    elements=st.one_of(st.integers(-3, 3), st.floats(-30, 30), st.just(-np.inf)),
)
masses = st.floats(0.0, 1.0, exclude_min=True)


def probabilities(scores: Float64) -> Float64:
    scores = scores.copy()
    scores[0] = 0.0  # at least one is possible
    return processors.softmax(scores, 1.0)


@given(scores64, st.integers(1, 70))
def test_top_k_keeps_the_best_and_of_equals_the_first(scores: Float64, count: int) -> None:
    by_rank = np.argsort(-scores, kind="stable")
    assert processors.top_k(scores, count).tolist() == sorted(by_rank[:count].tolist())


@given(scores64, masses)
def test_top_p_is_the_smallest_set_of_the_best(scores: Float64, mass: float) -> None:
    chances = probabilities(scores)
    kept = processors.top_p(chances, mass)
    by_rank = np.argsort(-chances, kind="stable")
    assert sorted(chances[kept]) == sorted(chances[by_rank[: len(kept)]])
    assert chances[kept].sum() >= mass - 1e-12
    assert chances[kept].sum() - chances[kept].min() < mass + 1e-12


@given(scores64, masses)
def test_typical_p_is_the_smallest_set_nearest_to_the_entropy(scores: Float64, mass: float) -> None:
    chances = probabilities(scores)
    kept = processors.typical_p(chances, mass)
    with np.errstate(divide="ignore"):
        surprise = -np.log(chances)
    entropy = sum(p * s for p, s in zip(chances, surprise, strict=True) if p > 0)
    distance = np.abs(surprise - entropy)
    rest = np.setdiff1d(np.arange(len(chances)), kept)
    assert chances[kept].sum() >= mass - 1e-12
    if len(rest):
        assert distance[kept].max() <= distance[rest].min() + 1e-12
    farthest = kept[distance[kept] >= distance[kept].max() - 1e-12]
    assert chances[kept].sum() - chances[farthest].max() < mass + 1e-12


@given(st.integers(0, 2**32), st.floats(0.2, 6.0), st.floats(0.01, 0.9999), st.booleans())
def test_the_histogram_before_the_sort_changes_nothing(
    seed: int, spread: float, mass: float, typical: bool
) -> None:
    chances = processors.softmax(np.random.default_rng(seed).normal(0, spread, 3000), 1.0)
    surprise = -np.log(chances)
    key = np.abs(surprise - (chances * surprise).sum()) if typical else surprise
    order = np.argsort(key, kind="stable")
    length = int(np.searchsorted(np.cumsum(chances[order]), mass)) + 1
    kept = processors.typical_p(chances, mass) if typical else processors.top_p(chances, mass)
    # Sums in another order may differ in the last bit and move the edge by one token.
    assert abs(len(kept) - length) <= 1
    assert set(kept) <= set(order[: length + 1])


@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.integers(1, 3000),
    st.sampled_from([0.0, 0.5, 4.0]),
    st.booleans(),
)
def test_contenders_miss_no_token_that_a_boost_can_lift(
    seed: int, size: int, count: int, margin: float, coarse: bool
) -> None:
    generator = np.random.default_rng(seed)
    scores = generator.normal(0, 3, size).astype(np.float32)
    if coarse:
        scores = np.round(scores)
    boosted = scores.astype(np.float64) + margin * generator.integers(0, 2, size)
    ids = processors.contenders(scores, count, margin)
    assert ids.tolist() == sorted(set(ids.tolist()))
    best = processors.top_k(boosted, count)
    assert ids[processors.top_k(boosted[ids], count)].tolist() == best.tolist()


@given(
    arrays(np.float32, 20, elements=st.floats(-100, 100, width=32)),
    st.lists(st.integers(0, 19), min_size=1, max_size=40),
    st.floats(0.01, 20),
)
def test_the_penalty_counts_a_token_once_and_leaves_the_others(
    logits: NDArray[np.float32], token_ids: list[int], penalty: float
) -> None:
    before = logits.copy()
    result = processors.penalise_repetition(logits, token_ids, penalty)
    assert np.array_equal(logits, before)
    for token_id, value in enumerate(logits.astype(float)):
        if token_id in token_ids:
            value = value * penalty if value < 0 else value / penalty
        assert result[token_id] == np.float32(value)


def test_a_tiny_penalty_ends_at_infinity_not_at_nan() -> None:
    logits = np.array([5.0, 0.0, -5.0, -np.inf, np.inf], dtype=np.float32)
    result = processors.penalise_repetition(logits, [0, 1, 2, 3, 4], 1e-300)
    assert result.tolist() == [np.inf, 0.0, 0.0, -np.inf, np.inf]
