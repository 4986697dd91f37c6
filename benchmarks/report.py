"""Numbers of one load level, as a row of a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from load_client import Outcome


@dataclass(frozen=True, slots=True)
class Level:
    """One load level. Times in milliseconds; None where nothing was measured."""

    streams: int
    requests: int
    failures: int
    tokens: int
    seconds: float
    tokens_per_second: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    peak_memory_mib: float | None
    errors: dict[str, int]  # what failed, and how often


def level(
    streams: int, outcomes: Sequence[Outcome], seconds: float, peak_bytes: int | None
) -> Level:
    """A request whose events are not as many as the tokens it reports counts as failed."""
    errors = Counter(problem(outcome) for outcome in outcomes)
    good = [outcome for outcome in outcomes if not problem(outcome)]
    del errors[""]
    tokens = sum(outcome.tokens for outcome in good)
    ttft = [outcome.ttft * 1000 for outcome in good]
    gaps = [gap * 1000 for outcome in good for gap in outcome.gaps()]
    return Level(
        streams=streams,
        requests=len(outcomes),
        failures=len(outcomes) - len(good),
        tokens=tokens,
        seconds=round(seconds, 6),
        tokens_per_second=round(tokens / seconds, 1) if seconds else 0.0,
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p99_ms=percentile(ttft, 99),
        itl_p50_ms=percentile(gaps, 50),
        itl_p99_ms=percentile(gaps, 99),
        peak_memory_mib=None if peak_bytes is None else round(peak_bytes / 2**20, 1),
        errors=dict(errors),
    )


def problem(outcome: Outcome) -> str:
    """Why a request does not count; empty for a good one."""
    if outcome.error:
        return outcome.error
    if len(outcome.arrivals) != outcome.tokens:
        return f"{len(outcome.arrivals)} events for {outcome.tokens} tokens"
    return ""


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest value that at least `percent` % of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    if not ranked:
        return None
    rank = max(1, -(-len(ranked) * percent // 100))
    return round(ranked[int(rank) - 1], 3)


def table(levels: Sequence[Level]) -> str:
    """Plain text, one line a level."""
    head = (
        "streams", "requests", "failed", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99",
        "peak memory",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [head, ("", "", "", "", "ms", "ms", "ms", "ms", "MiB")]
    for one in levels:
        numbers = (
            one.streams, one.requests, one.failures, one.tokens_per_second, one.ttft_p50_ms,
            one.ttft_p99_ms, one.itl_p50_ms, one.itl_p99_ms, one.peak_memory_mib,
        )  # fmt: skip
        rows.append(tuple("-" if n is None else str(n) for n in numbers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


def as_json(one: Level) -> dict[str, object]:
    """Plain data."""
    return asdict(one)
