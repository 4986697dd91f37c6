"""The three time limits of a running request, kept by one timer that is seldom touched.

Rule (MindIE's): deadline = min(t0 + timeout, t0 + token_timeout, start + e2e_timeout). In a stream
t0 restarts with each token; in a plain reply it is the start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from mindstream.plugin.errors import GenerationTimeout, TimeoutKind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Seconds."""

    client: float
    token: float
    e2e: float
    restart_at_token: bool


class Deadline:
    """Bounds every wait of one task. Only that task may call it."""

    def __init__(self, limits: TimeLimits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._start = self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: asyncio.Task[object] | None = None
        self._expired = False

    async def wait(self, awaitable: Awaitable[T]) -> T:
        """The result, or GenerationTimeout after cancelling the awaitable."""
        if self._limits.restart_at_token:
            self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_at(self._when(), self._on_timer)
        self._waiting = asyncio.current_task()
        try:
            return await awaitable
        except asyncio.CancelledError:
            if not self._expired:
                raise
            self._take_back_the_cancel()
            raise GenerationTimeout(self._kind()) from None
        finally:
            self._waiting = None

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _when(self) -> float:
        limits = self._limits
        return min(self._since + min(limits.client, limits.token), self._start + limits.e2e)

    def _kind(self) -> TimeoutKind:
        limits = self._limits
        when = self._when()
        if when == self._start + limits.e2e:
            return "server e2eTimeout"
        return "client timeout" if limits.client <= limits.token else "server tokenTimeout"

    def _on_timer(self) -> None:
        # The timer is not moved at each token: it looks when it fires and sleeps again if early.
        self._timer = None
        if self._waiting is None:
            return  # the reader is slow, not the engine; the next wait arms it again
        if self._loop.time() < self._when():
            self._timer = self._loop.call_at(self._when(), self._on_timer)
            return
        self._expired = True
        self._waiting.cancel()

    @staticmethod
    def _take_back_the_cancel() -> None:
        task = asyncio.current_task()
        # Python 3.10 does not count cancels and has nothing to take back.
        uncancel = getattr(task, "uncancel", None)
        if uncancel is not None:
            uncancel()
