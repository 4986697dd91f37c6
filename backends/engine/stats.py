"""Numbers about the engine that outlive one engine process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mindstream.backends.engine.messages import Stats
from mindstream.plugin.backend import BackendStatus, Limits, State

_COUNTERS = (
    "preemptions",
    "prefix_query_tokens",
    "prefix_hit_tokens",
    "prompt_tokens",
    "generated_tokens",
)


class Totals:
    """The latest stats of the running process on top of the counters of those before it."""

    def __init__(self) -> None:
        self.current = Stats()
        self._before = dict.fromkeys(_COUNTERS, 0)

    def restart(self) -> None:
        """The process ended: its counters stay, its gauges are zero."""
        for name in _COUNTERS:
            self._before[name] += getattr(self.current, name)
        self.current = Stats()

    def status(self, state: State, reason: str, limits: Limits | None) -> BackendStatus:
        """A snapshot."""
        now = self.current
        return BackendStatus(
            state=state,
            reason=reason,
            running=now.running,
            waiting=now.waiting,
            free_blocks=now.free_blocks,
            total_blocks=limits.num_blocks if limits else 0,
            **{name: self._before[name] + getattr(now, name) for name in _COUNTERS},
        )


class Pace:
    """How often a request ends, which is how soon a refused one may find room."""

    _WEIGHT = 0.1
    _LONGEST = 60

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self._interval = 0.0
        self._ends = 0

    def busy(self) -> None:
        """A request came where none was open: the time before says nothing."""
        self._last = self._clock()

    def ended(self) -> None:
        """One more request has ended."""
        now = self._clock()
        self._ends += 1
        weight = max(self._WEIGHT, 1 / self._ends)  # a plain mean until there are enough of them
        self._interval += weight * (now - self._last - self._interval)
        self._last = now

    @property
    def retry_after(self) -> int:
        """Whole seconds, 1 to 60: the mean interval between the latest ends, rounded up.

        Only time in which requests are open counts.
        """
        return min(self._LONGEST, max(1, math.ceil(self._interval)))
