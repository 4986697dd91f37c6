"""The PagedAttention operator against NumPy in float64, over random shapes, tables and lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

Call = Callable[..., int]


@dataclass(frozen=True)
class Case:
    """Inputs of one call, in the operator's order."""

    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    key_cache: NDArray[np.float32]
    value_cache: NDArray[np.float32]
    slots: NDArray[np.int32]
    block_tables: NDArray[np.int32]
    q_lens: NDArray[np.int32]
    kv_lens: NDArray[np.int32]

    def arrays(self) -> list[NDArray[np.generic]]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


def make_case(
    rng: np.random.Generator,
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block: int,
) -> Case:
    """`lengths`: (tokens already cached, new tokens) of each sequence; blocks lie at random."""
    q_heads, kv_heads, dim = heads
    counts = [-(-(done + new) // block) for done, new in lengths]
    order = rng.permutation(sum(counts) + 2).astype(np.int32)
    tables = np.full((len(lengths), max(counts) + 1), -1, np.int32)
    slots: list[int] = []
    for b, (done, new) in enumerate(lengths):
        tables[b, : counts[b]] = order[sum(counts[:b]) : sum(counts[: b + 1])]
        slots += [tables[b, i // block] * block + i % block for i in range(done, done + new)]
    rows = len(slots)
    cache = (len(order), block, kv_heads, dim)
    f32 = np.float32
    return Case(
        q=rng.standard_normal((rows, q_heads * dim), f32),
        k=rng.standard_normal((rows, kv_heads * dim), f32),
        v=rng.standard_normal((rows, kv_heads * dim), f32),
        key_cache=rng.standard_normal(cache, f32),
        value_cache=rng.standard_normal(cache, f32),
        slots=np.array(slots, np.int32),
        block_tables=tables,
        q_lens=np.array([new for _, new in lengths], np.int32),
        kv_lens=np.array([done + new for done, new in lengths], np.int32),
    )


def expected(case: Case) -> NDArray[np.float64]:
    """Full softmax in float64 over the keys in logical order."""
    _, block, kv_heads, dim = case.key_cache.shape
    keys, values = (
        c.reshape(-1, kv_heads, dim).astype(np.float64) for c in (case.key_cache, case.value_cache)
    )
    keys[case.slots] = case.k.reshape(-1, kv_heads, dim)
    values[case.slots] = case.v.reshape(-1, kv_heads, dim)
    group = case.q.shape[1] // dim // kv_heads
    out, row = np.zeros(case.q.shape), 0
    for b, new in enumerate(case.q_lens):
        positions = np.arange(case.kv_lens[b])
        at = case.block_tables[b, positions // block] * block + positions % block
        for i in range(new):
            seen = at[: case.kv_lens[b] - new + i + 1]
            q = case.q[row].reshape(kv_heads, group, dim).astype(np.float64)
            scores = np.einsum("kgd,jkd->kgj", q, keys[seen]) / np.sqrt(dim)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[row] = np.einsum("kgj,jkd->kgd", weights, values[seen]).reshape(-1)
            row += 1
    return out


LENGTHS = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 70)), min_size=1, max_size=5)


@st.composite
def heads_of_a_model(draw: st.DrawFn) -> tuple[int, int, int]:
    """Heads, KV heads and head size, of at most 2,048 columns; sizes up to 512 are taken."""
    dim = draw(st.integers(1, 160) | st.integers(161, 512))
    heads_a_key = draw(st.integers(1, min(20, 2048 // dim)))
    kv_heads = draw(st.integers(1, min(8, 2048 // (dim * heads_a_key))))
    return heads_a_key * kv_heads, kv_heads, dim


@given(LENGTHS, heads_of_a_model(), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_equals_numpy_and_writes_the_cache(
    call: Call, lengths: list[tuple[int, int]], heads: tuple[int, int, int], block: int, seed: int
) -> None:
    case = make_case(np.random.default_rng(seed), lengths, heads, block)
    want, out = expected(case), np.empty_like(case.q)
    assert call("PagedAttention", *case.arrays(), out) == 0
    np.testing.assert_allclose(out, want, rtol=2e-5, atol=2e-5)
    flat = case.key_cache.reshape(-1, heads[1] * heads[2])
    np.testing.assert_array_equal(flat[case.slots], case.k)


def test_a_row_does_not_depend_on_its_neighbours(call: Call) -> None:
    rng = np.random.default_rng(1)
    case = make_case(rng, [(130, 1), (0, 40), (7, 5), (300, 1)], (9, 3, 64), 16)
    whole, row = np.empty_like(case.q), 0
    assert call("PagedAttention", *case.arrays(), whole) == 0
    for b, new in enumerate(case.q_lens):
        rows, one = slice(row, row + new), slice(b, b + 1)
        alone = np.empty_like(case.q[rows])
        caches = [case.key_cache, case.value_cache]
        inputs = [case.q[rows], case.k[rows], case.v[rows], *caches, case.slots[rows]]
        inputs += [case.block_tables[one], case.q_lens[one], case.kv_lens[one]]
        assert call("PagedAttention", *inputs, alone) == 0
        np.testing.assert_array_equal(alone, whole[rows])
        row += new


def test_refuses_a_block_outside_the_cache(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    case = make_case(np.random.default_rng(0), [(5, 3)], (2, 1, 16), 4)
    case.block_tables[0, 1] = 99
    assert call("PagedAttention", *case.arrays(), np.empty_like(case.q)) != 0
    assert "block outside the cache" in capfd.readouterr().err
