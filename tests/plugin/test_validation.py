"""From a draft to a request: what a deployment cuts, refuses and fills in."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindstream.plugin.defaults import Defaults, Sourced
from mindstream.plugin.errors import InvalidRequest, RequestRefused
from mindstream.plugin.service import ServiceLimits
from mindstream.plugin.validation import Draft, draw_seed, to_generation_request

LIMITS = ServiceLimits(max_seq_len=20, max_input_tokens=10, max_iter_times=8, vocab_size=100)
DEFAULTS = Defaults(
    rule="ms",
    vocab_size=Sourced(100, "test"),
    eos_token_ids=Sourced((7, 8), "test"),
    do_sample=Sourced(False, "test"),
    temperature=Sourced(0.6, "test"),
    top_k=Sourced(5, "test"),
    top_p=Sourced(0.9, "test"),
    typical_p=Sourced(None, "test"),
    repetition_penalty=Sourced(1.1, "test"),
)


def test_what_the_client_left_out_comes_from_the_model() -> None:
    request = to_generation_request(Draft("r", (1, 2)), DEFAULTS, LIMITS)
    assert request.max_new_tokens == 8
    assert request.eos_token_ids == (7, 8)
    sampling = request.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_k) == (False, 0.6, 5)
    assert (sampling.top_p, sampling.typical_p, sampling.repetition_penalty) == (0.9, None, 1.1)


def test_ignore_eos() -> None:
    draft = Draft("r", (1,), ignore_eos=True)
    assert to_generation_request(draft, DEFAULTS, LIMITS).eos_token_ids == ()


@pytest.mark.parametrize(("top_k", "given"), [(99, 99), (100, 100), (101, 100), (2**31 - 1, 100)])
def test_top_k_ends_at_the_vocabulary(top_k: int, given: int) -> None:
    request = to_generation_request(Draft("r", (1,), top_k=top_k), DEFAULTS, LIMITS)
    assert request.sampling.top_k == given


def test_an_unknown_vocabulary_turns_top_k_off() -> None:
    unknown = replace(DEFAULTS, vocab_size=Sourced(0, "test"))
    assert to_generation_request(Draft("r", (1,), top_k=9), unknown, LIMITS).sampling.top_k == 0


@pytest.mark.parametrize(
    ("prompt", "before", "wanted", "given"),
    [
        (1, 0, 1, 1),
        (1, 0, 100, 8),  # max_iter_times
        (10, 0, None, 8),
        (10, 3, 100, 8),  # the three count
        (10, 7, 100, 8),
    ],
)
def test_output_limit(prompt: int, before: int, wanted: int | None, given: int) -> None:
    ids = (1,) * (prompt + before)
    draft = Draft("r", ids, max_new_tokens=wanted, generated_before=before)
    assert to_generation_request(draft, DEFAULTS, LIMITS).max_new_tokens == given


def test_the_sequence_length_cuts_the_output() -> None:
    wide = replace(LIMITS, max_iter_times=100, max_input_tokens=19)
    draft = Draft("r", (1,) * 15, max_new_tokens=100)
    assert to_generation_request(draft, DEFAULTS, wide).max_new_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "before", "message"),
    [
        (11, 0, "cannot be greater than 10,the input ids length is 11"),
        (11, 2, "cannot be greater than 10,the input ids length is 11"),
        (10, 10, "cannot be greater than 19,the input ids length is 20"),
    ],
)
def test_a_prompt_too_long(prompt: int, before: int, message: str) -> None:
    draft = Draft("r", (1,) * (prompt + before), generated_before=before)
    with pytest.raises(RequestRefused, match=message):
        to_generation_request(draft, DEFAULTS, LIMITS)


@pytest.mark.parametrize("bad", [100, -1, 2**32])
def test_ids_outside_the_vocabulary(bad: int) -> None:
    with pytest.raises(RequestRefused, match="Invalid Input Ids"):
        to_generation_request(Draft("r", (1, bad, 2)), DEFAULTS, LIMITS)


def test_nothing_left_to_generate() -> None:
    draft = Draft("r", (1, 2, 3), max_new_tokens=2, generated_before=2)
    with pytest.raises(InvalidRequest, match="2 tokens were generated before, and at most 2"):
        to_generation_request(draft, DEFAULTS, LIMITS)


@given(
    prompt=st.integers(1, 30), before=st.integers(0, 30), wanted=st.none() | st.integers(1, 2**31)
)
def test_every_accepted_request_keeps_every_limit(
    prompt: int, before: int, wanted: int | None
) -> None:
    draft = Draft("r", (1,) * (prompt + before), max_new_tokens=wanted, generated_before=before)
    try:
        request = to_generation_request(draft, DEFAULTS, LIMITS)
    except (RequestRefused, InvalidRequest):
        return
    assert before < request.max_new_tokens <= LIMITS.max_iter_times
    assert prompt + request.max_new_tokens <= LIMITS.max_seq_len
    assert prompt <= LIMITS.max_input_tokens
    assert wanted is None or request.max_new_tokens <= wanted


def test_drawn_seeds_differ_and_are_never_zero() -> None:
    seeds = {draw_seed() for _ in range(1000)}
    assert len(seeds) == 1000
    assert all(0 < seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**63
