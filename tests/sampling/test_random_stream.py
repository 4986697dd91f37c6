"""The uniform numbers: reproducible with one line of NumPy, and uniform."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from mindstream.backends.engine.random_stream import uniform

seeds = st.integers(0, 2**64 - 1)
indices = st.integers(0, 2**31)


@given(seeds, indices)
def test_it_is_the_documented_line_of_numpy(seed: int, index: int) -> None:
    bits = np.random.Philox(key=seed, counter=index)
    assert uniform(seed, index) == np.random.Generator(bits).random()
    assert 0.0 <= uniform(seed, index) < 1.0


@pytest.mark.parametrize(
    ("seed", "index", "value"),
    [
        (1, 0, 0.3035680343067586),
        (1, 1, 0.9002684531124185),
        (2, 0, 0.48891550429583774),
        (2**64 - 1, 511, 0.8538573725825538),
    ],
)
def test_the_stream_never_changes(seed: int, index: int, value: float) -> None:
    assert uniform(seed, index) == value


@pytest.mark.parametrize("of_one_request", [True, False])
def test_tokens_and_seeds_draw_independent_uniform_numbers(of_one_request: bool) -> None:
    numbers = [uniform(7, n) if of_one_request else uniform(n, 7) for n in range(10_000)]
    assert stats.kstest(numbers, "uniform").pvalue > 0.01
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
