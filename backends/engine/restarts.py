"""How patient the server is with its engine process, and when it gives up on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """All in seconds."""

    ping: float = 5.0  # between two signs of life asked of an engine
    silent: float = 30.0  # a step that takes longer marks the engine as unhealthy
    hung: float = 600.0  # a step that takes longer is ended by killing the engine
    shutdown: float = 5.0  # what an engine gets to close its device
    crash_window: float = 600.0  # of service, until a crash is forgotten
    first_pause: float = 0.25  # before the first restart; doubles with every remembered crash
    longest_pause: float = 30.0


class CrashRecord:
    """The crashes of the last `crash_window` seconds of service, up to serving.engine_restarts.

    Only an engine that serves makes a crash forgotten. Were the pauses and the loading counted, one
    that breaks slowly while it loads would be started again for ever.
    """

    def __init__(self, patience: Patience, limit: int) -> None:
        self._patience = patience
        self._limit = limit
        self._served = 0.0  # seconds of service so far
        self._moments: deque[float] = deque()  # the crashes, in seconds of service

    def __str__(self) -> str:
        window = f"{self._patience.crash_window:.0f} s of service"
        return f"crash {len(self._moments)} within {window}, serving.engine_restarts {self._limit}"

    def add(self, served: float) -> None:
        """One more, of an engine that served for so many seconds; 0: it broke while it started."""
        self._served += served
        self._moments.append(self._served)
        while self._moments[0] < self._served - self._patience.crash_window:
            self._moments.popleft()

    @property
    def too_many(self) -> bool:
        """The engine stays down. With a limit of 0 already after the first crash."""
        return len(self._moments) >= max(1, self._limit)

    @property
    def pause(self) -> float:
        """Seconds to wait before the next start."""
        doubled = self._patience.first_pause * 2.0 ** max(0, len(self._moments) - 1)
        return min(self._patience.longest_pause, doubled)
