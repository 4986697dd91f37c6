"""When a crashed engine is started again, and when no more. No clock: seconds are passed in."""

from __future__ import annotations

import pytest

from mindstream.backends.engine.restarts import CrashRecord, Patience

PATIENCE = Patience(crash_window=100.0, first_pause=0.25, longest_pause=30.0)


def record(limit: int = 1000) -> CrashRecord:
    return CrashRecord(PATIENCE, limit)


def pauses(crashes: CrashRecord, *served: float) -> list[float]:
    """The pause after each crash, of engines that had served for so many seconds."""
    found = []
    for seconds in served:
        crashes.add(seconds)
        found.append(crashes.pause)
    return found


def test_the_pause_doubles_with_every_crash_up_to_the_longest() -> None:
    assert pauses(record(), *[0.0] * 10) == [0.25, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_thousand_crashes_are_no_other_case() -> None:
    assert pauses(record(), *[0.0] * 1000)[-1] == 30


def test_a_good_run_makes_all_crashes_forgotten() -> None:
    crashes = record(limit=4)
    assert pauses(crashes, 0, 0, 0) == [0.25, 0.5, 1]
    assert pauses(crashes, 100.5, 0, 0) == [0.25, 0.5, 1]
    assert not crashes.too_many
    crashes.add(0)
    assert crashes.too_many


def test_a_run_just_too_short_forgets_nothing() -> None:
    assert pauses(record(), 0, 0, 99.5) == [0.25, 0.5, 1]


def test_short_runs_add_up_and_each_crash_is_forgotten_at_its_own_time() -> None:
    """Every 40 s of service: from the third on, this crash and the two in the 100 s before it."""
    assert pauses(record(), *[40.0] * 6) == [0.25, 0.5, 1, 1, 1, 1]


@pytest.mark.parametrize(("limit", "allowed"), [(0, 0), (1, 0), (2, 1), (5, 4), (1000, 999)])
def test_it_stays_down_after_as_many_crashes_as_the_limit(limit: int, allowed: int) -> None:
    """Whatever the pauses come to: with 1000 crashes they are hours, and none is forgotten."""
    crashes = record(limit)
    assert not crashes.too_many
    for _ in range(allowed):
        crashes.add(0)
        assert not crashes.too_many
    crashes.add(0)
    assert crashes.too_many


def test_the_record_says_how_many_crashes_and_names_the_limit() -> None:
    crashes = record(limit=3)
    crashes.add(0)
    crashes.add(20)
    assert str(crashes) == "crash 2 within 100 s of service, serving.engine_restarts 3"
