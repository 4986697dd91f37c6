"""What a client relies on: exact distributions, determinism, ties, and refusal of broken logits."""

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from scipy import stats

from mindstream.backends.engine.sampler import Sampler, SampleRow
from mindstream.plugin.request import SamplingParams
from mindstream.plugin.watermark import WatermarkKey

Float32 = NDArray[np.float32]

KEY = WatermarkKey(b"k" * 32, 0.25, 4.0)
SAMPLER = Sampler(KEY)
PROMPT = (3, 1, 2)


def choose(
    logits: Float32 | list[float], params: SamplingParams, index: int = 0, ids: Any = PROMPT
) -> int:
    row = np.asarray(logits, dtype=np.float32)[None]
    return SAMPLER.sample(row, [SampleRow(params, ids, index)])[0]


def plain_softmax(logits: Float32, temperature: float = 1.0) -> NDArray[np.float64]:
    weights = np.exp(logits.astype(np.float64) / temperature)
    return np.asarray(weights / weights.sum())


params_strategy = st.builds(
    SamplingParams,
    do_sample=st.booleans(),
    temperature=st.one_of(st.floats(1e-6, 10.0), st.just(1.0)),
    top_k=st.one_of(st.integers(0, 40), st.just(2**31 - 1)),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0, exclude_min=True)),
    typical_p=st.one_of(st.none(), st.floats(0.0, 1.0, exclude_min=True)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(1e-3, 20.0)),
    watermark=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
# Extreme logits, ties and impossible tokens; one finite value keeps the row usable.
logits_strategy = arrays(
    np.float32,
    st.integers(4, 300),
    elements=st.one_of(
        st.floats(-20, 20, width=32),
        st.integers(-2, 2),
        st.sampled_from([-np.inf, np.inf, 2.0**127, -(2.0**127)]),
    ),
).map(lambda row: np.append(row, np.float32(0.5)))


@given(logits_strategy, params_strategy, st.integers(0, 10_000))
def test_every_draw_is_from_the_cut_set(
    logits: Float32, params: SamplingParams, index: int
) -> None:
    before = logits.copy()
    row = SampleRow(params, PROMPT, index, (0,))
    chosen = SAMPLER.sample(logits[None], [row])[0]
    ids, chances = SAMPLER.distribution(logits, row)
    assert np.array_equal(logits, before)
    assert chosen in ids[chances > 0]
    assert logits[chosen] > -np.inf
    assert chances.sum() == pytest.approx(1.0)
    assert len(ids) <= (params.top_k or len(logits))
    assert np.all(np.diff(ids) > 0)


@given(logits_strategy, st.lists(params_strategy, min_size=2, max_size=6), st.data())
def test_a_row_does_not_see_its_batch(
    logits: Float32, params: list[SamplingParams], data: st.DataObject
) -> None:
    size = len(logits)
    others = arrays(np.float32, size, elements=st.floats(-20, 20, width=32))
    batch = np.stack([logits] + [data.draw(others) for _ in params[1:]])
    rows = [SampleRow(p, PROMPT, i) for i, p in enumerate(params)]
    alone = [SAMPLER.sample(batch[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert SAMPLER.sample(batch, rows) == alone
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = SAMPLER.sample(batch[list(order)], [rows[i] for i in order])
    assert shuffled == [alone[i] for i in order]


DISTRIBUTIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(typical_p=0.7),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.9, typical_p=0.95, repetition_penalty=1.2),
    SamplingParams(top_k=8, watermark=True),
]


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=str)
@pytest.mark.parametrize("by_seed", [False, True])
def test_ten_thousand_draws_follow_the_distribution(params: SamplingParams, by_seed: bool) -> None:
    """Tokens of one request, and first tokens of many requests; seeds are fixed."""
    logits = np.random.default_rng(5).normal(0, 1, 40).astype(np.float32)
    params = replace(params, do_sample=True)
    ids, chances = SAMPLER.distribution(logits, SampleRow(params, PROMPT, 0))
    counts = dict.fromkeys(ids.tolist(), 0)
    for n in range(10_000):
        seeded = replace(params, seed=n) if by_seed else params
        counts[choose(logits, seeded, 0 if by_seed else n)] += 1
    expected = chances * 10_000
    assert expected.min() > 3  # what the chi-square approximation needs
    assert stats.chisquare(list(counts.values()), expected).pvalue > 1e-3


def test_the_distributions_drawn_from_are_the_textbook_ones() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0], dtype=np.float32)

    def chances(**fields: Any) -> list[float]:
        row = SampleRow(SamplingParams(do_sample=True, **fields), (0,), 0)
        ids, p = SAMPLER.distribution(logits, row)
        result = np.zeros(4)
        result[ids] = p
        return [float(x) for x in result]

    p = plain_softmax(logits)  # 0.644, 0.237, 0.087, 0.032
    assert chances() == pytest.approx(list(p))
    assert chances(temperature=0.5) == pytest.approx(list(plain_softmax(logits, 0.5)))
    assert chances(top_k=2) == pytest.approx([*(p[:2] / p[:2].sum()), 0, 0])
    assert chances(top_p=0.7) == pytest.approx([*(p[:2] / p[:2].sum()), 0, 0])
    # The entropy is 0.947: surprise 1.44 is nearest to it, then 0.44, 2.44, 3.44.
    assert chances(typical_p=0.2) == [0, 1, 0, 0]
    assert chances(typical_p=0.5) == pytest.approx([*(p[:2] / p[:2].sum()), 0, 0])
    penalised = np.array([1.0, 1.0, 0.0, -1.0], dtype=np.float32)
    assert chances(repetition_penalty=2.0) == pytest.approx(list(plain_softmax(penalised)))
    # top_p looks at what top_k left: 0.644 / (0.644 + 0.237) is 0.73.
    assert chances(top_k=2, top_p=0.72) == [1, 0, 0, 0]
    assert chances(top_p=1.0, typical_p=1.0, top_k=99) == pytest.approx(list(p))


def test_the_same_seed_and_index_give_the_same_token_and_others_do_not() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    params = SamplingParams(do_sample=True, seed=2**64 - 1)
    tokens = [choose(logits, params, n) for n in range(20)]
    assert tokens == [choose(logits, params, n) for n in range(20)]
    assert len(set(tokens)) > 15
    assert tokens != [choose(logits, replace(params, seed=2**64 - 2), n) for n in range(20)]


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert choose([1.0, 5.0, 5.0, 5.0], SamplingParams()) == 1
    assert choose([1.0, np.inf, 5.0, np.inf], SamplingParams()) == 1
    assert choose([0.0] * 64, SamplingParams()) == 0
    one = SamplingParams(do_sample=True, top_k=1)
    assert {choose([1.0, 5.0, 5.0, 5.0], one, n) for n in range(50)} == {1}
    two = SamplingParams(do_sample=True, top_k=2)
    assert {choose([1.0, 5.0, 5.0, 5.0], two, n) for n in range(50)} == {1, 2}


def test_greedy_ignores_the_cuts_but_not_the_penalty() -> None:
    logits = [0.0, 4.0, 3.0, 1.0]
    greedy = SamplingParams(temperature=5.0, top_k=3, top_p=0.1, typical_p=0.1)
    assert choose(logits, greedy) == 1
    assert choose(logits, replace(greedy, repetition_penalty=2.0), ids=(1,)) == 2
    assert choose(logits, replace(greedy, repetition_penalty=2.0), ids=(1, 1, 2)) == 1
    # It raises a token below zero no further than zero.
    assert choose([-4.0, -3.0, -5.0], SamplingParams(repetition_penalty=2.0), ids=(1,)) == 0


@given(params_strategy, st.integers(0, 100))
def test_sampling_from_one_candidate_is_greedy(params: SamplingParams, index: int) -> None:
    logits = np.random.default_rng(index).normal(0, 3, 500).astype(np.float32)
    greedy = choose(logits, replace(params, do_sample=False))
    assert choose(logits, replace(params, do_sample=True, top_k=1), index) == greedy
    cold = replace(params, do_sample=True, temperature=1e-6, top_k=0)
    assert choose(logits, cold, index) == greedy


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: array("i", ids)])
def test_the_ids_so_far_may_be_any_sequence(kind: Any) -> None:
    params = SamplingParams(repetition_penalty=2.0, watermark=True)
    logits = np.random.default_rng(0).normal(0, 3, 500).astype(np.float32)
    ids = [int(logits.argmax()), 7]
    assert choose(logits, params, ids=kind(ids)) == choose(logits, params, ids=ids)


def test_a_vocabulary_of_one_and_a_large_top_k() -> None:
    everything = SamplingParams(
        do_sample=True, top_k=2**31 - 1, top_p=0.5, typical_p=0.5, watermark=True
    )
    assert choose([0.0], everything, ids=(0,)) == 0
    assert choose([-3e38], SamplingParams(do_sample=True), ids=(0,)) == 0


def test_infinite_logits_share_the_draw() -> None:
    params = SamplingParams(do_sample=True)
    drawn = {choose([np.inf, 3e38, np.inf, -np.inf], params, n) for n in range(50)}
    assert drawn == {0, 2}


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("watermark", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("logits", [[0.0, np.nan, 1.0], [np.nan] * 3, [-np.inf] * 3], ids=str)
def test_logits_that_mean_nothing_are_refused(
    do_sample: bool, watermark: bool, penalty: float, logits: list[float]
) -> None:
    params = SamplingParams(
        do_sample=do_sample, watermark=watermark, repetition_penalty=penalty, top_k=2
    )
    with pytest.raises(ValueError, match=r"largest logit of a row is (nan|-inf)"):
        choose(logits, params, ids=(0,))


def test_misuse_is_refused() -> None:
    row = SampleRow(SamplingParams(watermark=True), (0,), 0)
    with pytest.raises(ValueError, match="no key"):
        Sampler(None).sample(np.zeros((1, 4), dtype=np.float32), [row])
    with pytest.raises(ValueError, match="2 rows of logits for 1 sequences"):
        SAMPLER.sample(np.zeros((2, 4), dtype=np.float32), [row])
    assert SAMPLER.sample(np.zeros((0, 4), dtype=np.float32), []) == []
