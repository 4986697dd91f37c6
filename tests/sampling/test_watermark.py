"""The watermark: found where it is, not found where it is not, and keyed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from mindstream.backends.engine import logits_processors as processors
from mindstream.backends.engine.sampler import Sampler, SampleRow
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment, ServingConfig, WatermarkConfig
from mindstream.plugin.request import SamplingParams
from mindstream.plugin.watermark import ALARM, WatermarkKey, detect, load_key

VOCAB = 4096
KEY = WatermarkKey(b"a" * 32, 0.25, 4.0)
OTHER_KEY = WatermarkKey(b"b" * 32, 0.25, 4.0)


def language(previous: int) -> NDArray[np.float32]:
    """Logits like a language model's: Zipf's law, reshuffled by the context; about 3.5 nats."""
    generator = np.random.default_rng(previous % 509)
    zipf = -1.1 * np.log(np.arange(1, VOCAB + 1))
    logits: NDArray[np.float32] = (zipf + generator.normal(10, 3.1, VOCAB)).astype(np.float32)
    return logits


def write(key: WatermarkKey | None, params: SamplingParams, length: int = 201) -> list[int]:
    """A text of `length` tokens, watermarked if there is a key."""
    sampler = Sampler(key)
    params = replace(params, watermark=key is not None)
    tokens = [params.seed % VOCAB]
    while len(tokens) < length:
        row = SampleRow(params, tokens, len(tokens) - 1)
        tokens += sampler.sample(language(tokens[-1])[None], [row])
    return tokens


def test_the_synthetic_language_has_realistic_entropy() -> None:
    chances = [processors.softmax(language(n).astype(np.float64), 1.0) for n in range(50)]
    entropy = np.mean([-(p * np.log(p)).sum() for p in chances])
    assert 2.0 < entropy < 4.0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(do_sample=True),
        SamplingParams(do_sample=True, top_k=10),
        SamplingParams(do_sample=True, top_p=0.9, temperature=0.7),
        SamplingParams(do_sample=True, top_k=50, typical_p=0.9, repetition_penalty=1.1),
    ],
    ids=str,
)
def test_200_marked_tokens_are_found_with_the_key_alone(params: SamplingParams) -> None:
    for seed in range(1, 11):
        text = write(KEY, replace(params, seed=seed))
        found = detect(text, KEY, VOCAB)
        assert found.watermarked
        assert found.p_value < 1e-6
        assert detect(text, OTHER_KEY, VOCAB).p_value > 1e-3
        # Words before and after from another hand do not hide it.
        assert detect(write(None, params, 60) + text, KEY, VOCAB).watermarked


def test_greedy_text_is_marked_too() -> None:
    text = write(KEY, SamplingParams(repetition_penalty=1.3))
    assert detect(text, KEY, VOCAB).watermarked


def test_no_false_alarm_in_a_thousand_plain_texts() -> None:
    cumulative = {
        n: np.cumsum(processors.softmax(language(n).astype(float), 1.0)) for n in range(509)
    }
    numbers = np.random.default_rng(11).random((1000, 201))
    p_values, by_own_key = [], []
    for number_of_text, row in enumerate(numbers):
        text = [0]
        for number in row:
            text.append(int(np.searchsorted(cumulative[text[-1] % 509], number)))
        p_values.append(detect(text[1:], KEY, VOCAB).p_value)
        own_key = replace(KEY, secret=number_of_text.to_bytes(32, "little"))
        by_own_key.append(detect(text[1:], own_key, VOCAB).p_value)
    assert min(p_values + by_own_key) > ALARM
    # The p-value keeps its word over keys: about 50 of 1,000 are below 0.05, and 10 below 0.01.
    assert sum(p < 0.05 for p in by_own_key) < 75
    assert sum(p < 0.01 for p in by_own_key) < 22


def test_repetitive_plain_text_is_no_alarm() -> None:
    for first in range(200):
        pair = [first, first + 1]
        found = detect(pair * 200, KEY, VOCAB)
        assert found.scored == 2
        assert found.p_value > 0.05


@given(st.integers(0, 2**31), st.integers(0, 200_000), st.floats(0.01, 0.99), st.binary(min_size=1))
def test_sampler_and_detector_agree_on_green(
    previous: int, first: int, gamma: float, secret: bytes
) -> None:
    key = WatermarkKey(secret[:64], gamma, 2.0)
    ids = np.arange(first, first + 50)
    mask = processors.green_mask(key, previous, ids)
    assert mask.tolist() == [key.is_green(previous, int(t)) for t in ids]


def test_the_green_list_never_changes() -> None:
    """Texts marked by an older version must stay detectable."""
    key = load_key(deployment(Path("x.yaml"), WatermarkConfig()))
    assert [t for t in range(40) if key.is_green(7, t)] == [2, 7, 15, 18, 20, 23, 25, 34, 37, 39]
    assert [t for t in range(40) if key.is_green(8, t)] == [0, 2, 3, 8, 17, 18, 23, 29, 33, 39]


@pytest.mark.parametrize("gamma", [0.1, 0.25, 0.5])
def test_the_green_share_is_gamma_and_lists_are_independent(gamma: float) -> None:
    key = replace(KEY, gamma=gamma)
    ids = np.arange(50_000)
    masks = np.array([processors.green_mask(key, previous, ids) for previous in range(20)])
    deviation = np.sqrt(gamma * (1 - gamma) / 50_000)
    assert np.abs(masks.mean(axis=1) - gamma).max() < 4.5 * deviation
    together = (masks[:-1] & masks[1:]).mean(axis=1)
    assert np.abs(together - gamma**2).max() < 4.5 * deviation


def test_a_text_ends_as_likely_as_without_a_mark() -> None:
    logits = language(3)
    eos = (int(np.argsort(logits)[-3]), 5)
    plain = processors.softmax(logits.astype(np.float64), 1.0)[list(eos)]
    for previous in range(20):
        params = SamplingParams(do_sample=True, watermark=True)
        ids, chances = Sampler(KEY).distribution(logits, SampleRow(params, [previous], 0, eos))
        assert ids.tolist() == list(range(VOCAB))
        np.testing.assert_allclose(chances[list(eos)], plain, rtol=1e-9)


@given(st.integers(0, 3000), st.data(), st.sampled_from([0.1, 0.25, 0.5, 0.9]))
def test_the_p_value_is_the_exact_binomial_tail(
    scored: int, data: st.DataObject, gamma: float
) -> None:
    green = data.draw(st.integers(0, scored))
    expected = stats.binom.sf(green - 1, scored, gamma)
    assert p_value(green, scored, gamma) == pytest.approx(expected, rel=1e-9, abs=1e-290)


def p_value(green: int, scored: int, gamma: float) -> float:
    """Of a text built to have `green` green pairs among `scored` distinct ones."""

    class Counted(WatermarkKey):
        """Green by position: the key of a coin that has fallen."""

        def is_green(self, previous_id: int, token_id: int) -> bool:
            return previous_id < green

    return detect(range(scored + 1), Counted(b"", gamma, 0.0), scored + 1).p_value


@pytest.mark.parametrize("text", [[], [5]])
def test_a_text_without_pairs_is_no_evidence(text: list[int]) -> None:
    found = detect(text, KEY, VOCAB)
    assert (found.z, found.p_value, found.scored, found.watermarked) == (0.0, 1.0, 0, False)


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_ids_of_another_tokenizer_are_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match=rf"token id {token_id} is outside .*{VOCAB}"):
        detect([1, token_id], KEY, VOCAB)


def deployment(path: Path, watermark: WatermarkConfig) -> Deployment:
    return Deployment(path, ServingConfig(watermark=watermark), {}, None)


def test_the_key_comes_from_the_file_beside_the_deployment(tmp_path: Path) -> None:
    (tmp_path / "secret.key").write_bytes(b"0123456789abcdef")
    named = deployment(tmp_path / "m.yaml", WatermarkConfig(key_file="secret.key", gamma=0.5))
    key = load_key(named)
    public = load_key(deployment(tmp_path / "m.yaml", WatermarkConfig()))
    assert (key.gamma, key.delta, len(key.secret)) == (0.5, 4.0, 32)
    assert key.secret != public.secret
    assert "0123" not in repr(key) and repr(key.secret) not in repr(key)
    (tmp_path / "secret.key").write_bytes(b"0123456789abcdef\n")
    assert load_key(named) == key
    (tmp_path / "other.key").write_bytes(b"fedcba9876543210")
    assert load_key(named, tmp_path / "other.key").secret != key.secret


def nothing(path: Path) -> None:
    """Leaves the file out."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "No such file"),
        (Path.touch, "is empty"),
        (lambda path: path.write_bytes(b" \n"), "is empty"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.write_bytes(b"x" * 70_000), "larger than 65536 bytes"),
    ],
)
@pytest.mark.parametrize("by_option", [False, True])
def test_a_key_that_cannot_be_used_is_named(
    tmp_path: Path, make: Callable[[Path], object], message: str, by_option: bool
) -> None:
    path = tmp_path / "k.key"
    make(path)
    config = WatermarkConfig() if by_option else WatermarkConfig(key_file="k.key")
    with pytest.raises(ConfigError) as refusal:
        load_key(deployment(tmp_path / "m.yaml", config), path if by_option else None)
    text = str(refusal.value)
    assert message in text
    assert str(path) in text
    assert ("--key-file" if by_option else "m.yaml: serving.watermark.key_file") in text
