"""The fused decoder against a NumPy decoder in float64, and against itself in other batches."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mindstream.backends.mindspore.cpu.fused_weights import FusedShape, FusedWeights
from mindstream.backends.mindspore.cpu.library import load_library, set_threads
from mindstream.plugin.errors import ConfigError

# layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, block_size, eps, tied
LLAMA = FusedShape(2, 96, 3, 1, 32, 160, 77, 16, 1e-5, True)
QWEN2 = FusedShape(1, 64, 4, 4, 32, 96, 50, 32, 1e-6, False)
# Largest difference of a logit whose standard deviation is about 1.
TOLERANCE = {"f32": 2e-5, "bf16": 0.12, "int8": 0.4}
Make = Callable[..., Any]
quick = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@st.composite
def shapes(draw: st.DrawFn) -> FusedShape:
    """Any that the kernels take, of sizes that NumPy computes in milliseconds."""
    dim = 32 * draw(st.integers(1, 8))
    heads_a_key = draw(st.integers(1, min(13, 1024 // dim)))
    kv_heads = draw(st.integers(1, min(4, 1024 // (dim * heads_a_key))))
    return FusedShape(
        layers=draw(st.integers(1, 2)),
        hidden=32 * draw(st.integers(1, 5)),
        heads=kv_heads * heads_a_key,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate=32 * draw(st.integers(1, 6)),
        vocab=draw(st.integers(1, 100)),
        block_size=16 * draw(st.integers(1, 4)),
        eps=draw(st.sampled_from([1e-5, 1e-6])),
        tied=draw(st.booleans()),
    )


def tokens(rng: np.random.Generator, shape: FusedShape, count: int) -> list[int]:
    return [int(i) for i in rng.integers(0, shape.vocab, count)]


@given(
    shapes(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["f32", "bf16", "int8"]),
    st.sampled_from(["f32", "bf16"]),
    st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=4),
    st.integers(0, 2**31),
)
@quick
def test_equals_numpy_through_the_paged_cache(
    decoder: Make,
    shape: FusedShape,
    biased: bool,
    normed: bool,
    weights: str,
    cache: str,
    lengths: list[tuple[int, int]],
    seed: int,
) -> None:
    """First what is cached, sequence by sequence, then all new tokens in one ragged batch."""
    rng = np.random.default_rng(seed)
    counts = [-(-sum(length) // shape.block_size) for length in lengths]
    made = decoder(shape, weights, cache, biased, normed, seed, blocks=sum(counts) + 2)
    order, batch, whole = list(rng.permutation(made.blocks)), [], []
    for (cached, new), count in zip(lengths, counts, strict=True):
        ids = tokens(rng, shape, cached + new)
        blocks = [int(order.pop()) for _ in range(count)]
        if cached:
            made.run([(ids[:cached], 0, blocks)])
        batch.append((ids[cached:], cached, blocks))
        whole.append(ids)
    logits = made.run(batch)
    want = [made.expected(ids)[cached:] for ids, (cached, _) in zip(whole, lengths, strict=True)]
    tolerance = TOLERANCE["bf16" if weights == "f32" and cache == "bf16" else weights]
    np.testing.assert_allclose(logits, np.concatenate(want), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
@pytest.mark.parametrize("cache", ["f32", "bf16"])
def test_a_row_has_the_same_bits_in_every_batch(decoder: Make, weights: str, cache: str) -> None:
    """Alone, in a batch of 40, in one prompt, in chunks, and on one thread: not a bit differs."""
    rng = np.random.default_rng(7)
    made = decoder(LLAMA, weights, cache, False, False, 1, blocks=100)
    ids = tokens(rng, LLAMA, 70)
    blocks, far = [3, 9, 1, 7, 5], list(range(10, 96))
    whole = made.run([(ids, 0, blocks)])
    chunks = [made.run([(ids[a:b], a, blocks)]) for a, b in ((0, 33), (33, 34), (34, 70))]
    np.testing.assert_array_equal(np.concatenate(chunks), whole)
    crowd = [([7], 0, [far[i]]) for i in range(30)] + [(ids[50:], 50, blocks)]
    crowd += [([1, 2, 3], 0, [far[30]]), ([5], 0, [far[31]])]
    np.testing.assert_array_equal(made.run(crowd)[30:50], whole[50:])
    set_threads(1)
    try:
        np.testing.assert_array_equal(made.run([(ids[50:], 50, blocks)]), whole[50:])
    finally:
        set_threads(0)


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
def test_only_the_wanted_rows_are_finished_and_have_the_same_bits(
    decoder: Make, weights: str
) -> None:
    rng = np.random.default_rng(17)
    made = decoder(LLAMA, weights, "bf16", False, False, 2, blocks=100)
    ids, blocks, far = tokens(rng, LLAMA, 70), [3, 9, 1, 7, 5], [20, 21]
    batch = [(ids, 0, blocks), (ids[:20], 0, far)]
    whole = made.run(batch)
    for rows in ([0], [69], [89], [5, 69, 70, 89], list(range(0, 90, 7)), list(range(80))):
        np.testing.assert_array_equal(made.run(batch, rows), whole[rows])
    # The keys and values of the others are there all the same.
    made.run([(ids[:50], 0, [30, 31, 32, 33, 34])], [49])
    rest = made.run([(ids[50:], 50, [30, 31, 32, 33, 34])])
    np.testing.assert_array_equal(rest, whole[50:70])


@given(
    st.integers(1, 200),
    st.integers(1, 130),
    st.sampled_from(["f32", "bf16", "int8"]),
    st.lists(st.integers(0, 199), max_size=6),
    st.integers(0, 2**31),
)
@quick
def test_the_best_ids_are_those_of_the_largest_logits(
    decoder: Make, vocab: int, rows: int, weights: str, alike: list[int], seed: int
) -> None:
    """For any vocabulary and number of rows; of equal logits the first."""
    shape = dataclasses.replace(LLAMA, layers=1, vocab=vocab, tied=False)
    same = [i for i in alike if i < vocab]

    def twins(name: str, data: Any) -> Any:
        if name == "lm_head.weight" and same:
            data[same] = data[same[0]]
        return data

    made = decoder(shape, weights, "bf16", False, False, seed, change=twins)
    ids = tokens(np.random.default_rng(seed), shape, rows)
    batch = [(ids, 0, list(range(9)))]
    logits = made.run(batch)
    np.testing.assert_array_equal(made.run(batch, best=True)[:, 0], logits.argmax(1))


@pytest.mark.parametrize("weights", ["f32", "bf16", "int8"])
def test_a_row_whose_logits_cannot_be_compared_has_no_best_id(decoder: Make, weights: str) -> None:
    """NaN in one row's state, in one logit of all rows, and logits that are all -inf."""
    shape = dataclasses.replace(LLAMA, tied=False)
    batch = [([1, 2, 3], 0, [0]), ([4], 0, [1])]

    def made(**spoilt: Callable[[Any], Any]) -> Any:
        def change(name: str, data: Any) -> Any:
            return spoilt[name](data.copy()) if name in spoilt else data

        return decoder(shape, weights, "f32", False, False, 5, change=change)

    def filled(place: Any, value: float) -> Callable[[Any], Any]:
        def change(data: Any) -> Any:
            data[place] = value
            return data

        return change

    def one_sign(sign: float) -> Any:
        """Every logit is infinite, with the sign of the row's first hidden value, or the other."""
        norm = {"model.norm.weight": lambda data: filled(0, 1e3)(data * 0)}
        return made(
            **norm, **{"lm_head.weight": lambda data: filled((slice(None), 0), sign)(data * 0)}
        )

    best = made(**{"model.embed_tokens.weight": filled(4, np.nan)}).run(batch, best=True)
    assert best[3, 0] == -1 and (best[:3] >= 0).all()
    for sign in (3e37, -3e37):
        found = one_sign(sign)
        logits = found.run(batch)
        assert np.isinf(logits).all()
        want = [-1 if row[0] < 0 else 0 for row in logits]
        np.testing.assert_array_equal(found.run(batch, best=True)[:, 0], want)
    if weights != "int8":  # whose scales are no place for a NaN
        found = made(**{"lm_head.weight": filled(70, np.nan)})
        assert (found.run(batch, best=True) == -1).all()


@pytest.mark.parametrize("cache", ["f32", "bf16"])
def test_a_long_context_split_over_threads_has_the_same_bits(decoder: Make, cache: str) -> None:
    rng = np.random.default_rng(3)
    made = decoder(LLAMA, "f32", cache, False, False, 2, blocks=80)
    ids, blocks = tokens(rng, LLAMA, 1200), [int(i) for i in rng.permutation(80)[:76]]
    made.run([(ids[:-1], 0, blocks)])
    alone = made.run([(ids[-1:], 1199, blocks)])  # little work: split by 512 keys
    others = [([i % 70], 0, [int(b)]) for i, b in enumerate(set(range(80)) - set(blocks))] * 8
    together = made.run([(ids[-1:], 1199, blocks), *others])
    np.testing.assert_array_equal(alone[0], together[0])
    tolerance = 5e-5 if cache == "f32" else 0.1
    np.testing.assert_allclose(alone[0], made.expected(ids)[-1], atol=tolerance, rtol=tolerance)


def test_what_a_stranger_left_in_a_block_does_not_matter(decoder: Make) -> None:
    """The tail of a block may hold NaN of a sequence that was broken."""
    made = decoder(LLAMA, "bf16", "bf16", False, False, 4)
    first = made.run([([1, 2, 3], 0, [0])])
    made.keys[:], made.values[:] = np.nan, np.nan
    np.testing.assert_array_equal(made.run([([1, 2, 3], 0, [0])]), first)
    assert np.isfinite(first).all()


def test_bf16_and_f16_checkpoints_are_read_as_their_values(decoder: Make) -> None:
    made = decoder(QWEN2, "f32", "f32", True, False, 5)
    want = made.run([([4, 5, 6], 0, [1])])
    for kind in ("BF16", "F16"):
        loaded = FusedWeights(QWEN2, "f32", "f32")
        for name, data in made.tensors.items():
            if kind == "BF16":
                bits = (data.view(np.uint32) >> 16).astype(np.uint16)
                exact = (bits.astype(np.uint32) << 16).view(np.float32)
            else:
                bits, exact = data.astype(np.float16).view(np.uint16), data.astype(np.float16)
            made.tensors[name] = exact.astype(np.float32)
            loaded.put(name, kind, bits)
        loaded.finish()
        own = made.model[0]
        made.model[0] = loaded.handle
        got = made.run([([4, 5, 6], 0, [1])])
        np.testing.assert_allclose(got, made.expected([4, 5, 6]), atol=2e-5, rtol=2e-5)
        assert np.abs(got - want).max() < 0.1
        made.model[0] = own
        loaded.close()


def test_wrong_tables_and_models_are_refused(
    decoder: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    made = decoder(LLAMA, "bf16", "f32", False, False, 6)
    for batch in ([([1], 0, [999])], [([1], 40, [0])], [([999], 0, [0])]):
        with pytest.raises((AssertionError, IndexError)):
            made.run(batch)
    assert "block outside the cache: 999" in capfd.readouterr().err
    made.model = np.array([12345], np.int64)
    with pytest.raises(AssertionError):
        made.run([([1], 0, [0])])
    assert "no such model: 12345" in capfd.readouterr().err


def test_a_checkpoint_that_does_not_fit_is_refused(decoder: Make) -> None:
    made = decoder(LLAMA, "bf16", "f32", False, False, 6)
    loaded = FusedWeights(LLAMA, "bf16", "f32")
    with pytest.raises(ConfigError, match=r"rotary\.weight"):
        loaded.put("model.layers.0.rotary.weight", "F32", np.zeros((2, 2), np.float32))
    with pytest.raises(ConfigError, match=r"q_proj.weight \[4, 96\]: .*96 rows"):
        bad = np.zeros((4, 96), np.float32)
        loaded.put("model.layers.0.self_attn.q_proj.weight", "F32", bad)
    for name, data in made.tensors.items():
        if name != "model.layers.1.mlp.up_proj.weight":
            loaded.put(name, "F32", data)
    with pytest.raises(ConfigError, match="layer 1 has no up weight"):
        loaded.finish()
    loaded.close()


@pytest.mark.parametrize(
    ("field", "value"), [("hidden", 100), ("head_dim", 16), ("block_size", 4), ("intermediate", 50)]
)
def test_shapes_the_kernels_cannot_take_are_named(field: str, value: int) -> None:
    values = {name: getattr(LLAMA, name) for name in LLAMA.__dataclass_fields__}
    shape = FusedShape(**{**values, field: value})
    assert str(value) in (shape.obstacle() or "")
    with pytest.raises(ConfigError, match=str(value)):
        FusedWeights(shape, "bf16", "f32")


def test_idle_threads_use_no_processor_time(decoder: Make) -> None:
    made = decoder(LLAMA, "bf16", "f32", False, False, 6)
    made.run([([1], 0, [0])])
    usage = ctypes.CDLL(None).clock
    usage.restype = ctypes.c_long
    import time

    time.sleep(0.05)  # the workers spin for a moment first
    before = usage()
    time.sleep(0.3)
    assert usage() - before < 100_000  # microseconds
    assert load_library().mindstream_threads() >= 1
