"""Streams stay smooth while a prompt is prefilled, on a device of any speed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mindstream.backends.engine.pacing import Pacer


def device(step: float, token: float, pacer: Pacer, steps: int, decodes: int = 8) -> list[float]:
    """Seconds of each step while one long prompt is prefilled, at these costs."""
    took = []
    for _ in range(steps):
        tokens = pacer.allowance(512, decodes, decodes, 1)
        took.append(step + token * tokens)
        pacer.observe(decodes, tokens, took[-1])
    return took


@pytest.mark.parametrize("token", [0.00001, 0.0002, 0.0005])
@pytest.mark.parametrize("step", [0.02, 0.05])
def test_a_step_with_a_prompt_takes_less_than_twice_as_long_as_one_without(
    step: float, token: float
) -> None:
    pacer = Pacer()
    for _ in range(50):
        pacer.observe(8, 0, step)
    pacer.observe(0, 100, step + 100 * token)  # an earlier prompt
    assert max(device(step, token, pacer, 50)) < 2 * step


def test_a_device_that_is_quick_at_prompts_gets_the_whole_budget() -> None:
    pacer = Pacer()
    for _ in range(5):
        pacer.observe(8, 0, 0.05)
        pacer.observe(0, 100, 0.05)
    assert pacer.allowance(200, 8, 8, 1) == 200


def test_without_streams_nothing_is_held_back() -> None:
    pacer = Pacer()
    pacer.observe(8, 0, 0.05)
    pacer.observe(0, 100, 10.0)
    assert pacer.allowance(512, 0, 0, 1) == 512


def test_a_prompt_always_gets_on() -> None:
    pacer = Pacer()
    pacer.observe(8, 0, 0.001)
    pacer.observe(0, 100, 10.0)
    assert pacer.allowance(512, 8, 8, 1) == 16
    assert pacer.allowance(3, 8, 8, 1) == 3


def test_where_many_wait_they_get_more() -> None:
    pacer = Pacer()
    for _ in range(5):
        pacer.observe(16, 0, 0.1)
        pacer.observe(0, 1000, 2.0)  # 2 ms a prompt token
    alone = pacer.allowance(512, 16, 16, 1)
    assert alone == pacer.allowance(512, 16, 16, 3) == pytest.approx(25, abs=5)
    assert pacer.allowance(512, 16, 16, 4) == pytest.approx(4 * alone, abs=4)
    assert pacer.allowance(512, 16, 16, 20) == 512


def test_it_learns_that_the_device_became_slower() -> None:
    pacer = Pacer()
    pacer.observe(8, 0, 0.05)
    pacer.observe(0, 100, 0.06)
    assert device(0.05, 0.001, pacer, 40)[-1] < 0.1


@pytest.fixture
def busy() -> Pacer:
    """Has seen prompts and 1 to 8 streams: 5 ms a step, 0.5 ms a decode, 0.3 ms a prompt token."""
    pacer = Pacer()
    for step in range(200):
        decodes, tokens = step % 9, (step % 7) * 20
        if decodes or tokens:
            pacer.observe(decodes, tokens, 0.005 + 0.0005 * decodes + 0.0003 * tokens)
    return pacer


def test_the_decodes_of_a_batch_never_seen_alone_are_foreseen(busy: Pacer) -> None:
    for _ in range(100):  # somebody always waits
        tokens = busy.allowance(512, 29, 29, 3)
        busy.observe(29, tokens, 0.005 + 0.0005 * 29 + 0.0003 * tokens)
    assert tokens == pytest.approx(0.5 * (0.005 + 0.0005 * 29) / 0.0003, rel=0.2)


@pytest.mark.parametrize(("decodes", "tokens"), [(8, 0), (0, 100), (8, 20)])
def test_one_step_that_was_disturbed_changes_little(busy: Pacer, decodes: int, tokens: int) -> None:
    before = busy.allowance(512, 8, 8, 1)
    busy.observe(decodes, tokens, 1.0)
    assert busy.allowance(512, 8, 8, 1) == pytest.approx(before, rel=0.3)


def test_a_clock_that_stands_still_says_nothing() -> None:
    pacer = Pacer()
    pacer.observe(8, 0, 0.0)
    pacer.observe(8, 16, 0.0)
    assert pacer.allowance(512, 8, 8, 1) == 512


# One that recurs, as of an idle server, or any other.
_step = st.tuples(
    st.integers(0, 300), st.integers(0, 8192), st.floats(1e-7, 100.0), st.integers(1, 30)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_step, min_size=1, max_size=60))
def test_whatever_the_steps_took_the_allowance_is_a_number_of_tokens(
    steps: list[tuple[int, int, float, int]],
) -> None:
    pacer = Pacer()
    for decodes, tokens, seconds, times in steps:
        for _ in range(times):
            pacer.observe(decodes, tokens, seconds)
        for prompts in (1, 100):
            assert 1 <= pacer.allowance(512, decodes, decodes, prompts) <= 512


def test_many_hours_of_the_same_step_with_its_scatter_do_no_harm() -> None:
    pacer, numbers = Pacer(), random.Random(1)
    for _ in range(100_000):
        pacer.observe(32, 0, 5e-5 * numbers.choice((1, 1.1, 0.9) * 30 + (5,)))
    for _ in range(50):
        tokens = pacer.allowance(512, 32, 32, 1)
        pacer.observe(32, tokens, 5e-5 + 1e-6 * tokens)
    assert tokens == pytest.approx(25, abs=8)


# A device of 30 ms a step, 1.25 ms a decode and 0.5 ms a prompt token, with 16 streams: half of the
# decodes' 50 ms are 50 prompt tokens.
def seconds_of(decodes: int, tokens: int) -> float:
    return 0.03 + 0.00125 * decodes + 0.0005 * tokens


@pytest.fixture
def measured() -> Pacer:
    pacer = Pacer()
    for _ in range(20):
        pacer.observe(16, 0, seconds_of(16, 0))
        pacer.observe(16, 40, seconds_of(16, 40))
    return pacer


@pytest.mark.parametrize("scatter", [0.03, 0.1, 0.2])
def test_hours_of_steps_that_scatter_change_nothing(measured: Pacer, scatter: float) -> None:
    numbers, given_tokens = random.Random(1), []
    for _ in range(20_000):  # a prompt always waits
        tokens = measured.allowance(2048, 16, 16, 1)
        given_tokens.append(tokens)
        measured.observe(16, tokens, seconds_of(16, tokens) * numbers.lognormvariate(0, scatter))
    assert sum(given_tokens[-5000:]) / 5000 == pytest.approx(25 * 2, rel=0.15)


@pytest.mark.parametrize("budget", [512, 8192])
@pytest.mark.parametrize("kind", [(16, 0), (0, 300), (16, 20)])
@pytest.mark.parametrize("asleep", [1, 6])
def test_it_recovers_from_a_machine_that_slept(
    measured: Pacer, budget: int, kind: tuple[int, int], asleep: int
) -> None:
    for _ in range(asleep):
        measured.observe(*kind, 60.0)
    for step in range(200):
        tokens = measured.allowance(budget, 16, 16, 1)
        measured.observe(16, tokens, seconds_of(16, tokens))
        if step % 4 == 0:
            measured.observe(16, 0, seconds_of(16, 0))
    assert tokens == pytest.approx(50, abs=5)


@pytest.mark.parametrize(("every", "factor"), [(10, 2.0), (3, 2.0), (2, 3.0)])
def test_steps_that_are_slow_again_and_again_are_part_of_what_is_usual(
    measured: Pacer, every: int, factor: float
) -> None:
    for step in range(6000):
        slow = factor if step % every == 0 else 1.0
        tokens = measured.allowance(512, 16, 16, 1)
        measured.observe(16, tokens, seconds_of(16, tokens) * slow)
    assert 16 <= tokens <= 60


def test_what_a_step_of_some_of_the_streams_takes_is_not_that_of_all() -> None:
    """`serving.overlap`: each of two groups has half of the decodes."""
    pacer = Pacer()
    for decodes in range(1, 17):
        pacer.observe(decodes, 0, seconds_of(decodes, 0))
    pacer.observe(0, 100, seconds_of(0, 100))
    assert pacer.allowance(512, 8, 16, 1) == pytest.approx(0.5 * 0.04 / 0.0005, rel=0.15)
