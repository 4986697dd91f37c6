"""One request on the event loop's side: the chunks the engine sent and nobody has taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Protocol

from mindstream.backends.engine.messages import FINISH_REASONS, NO_TOKEN, Delta, Failure
from mindstream.plugin.errors import BackendFailed, Overloaded, RequestError, RequestRefused
from mindstream.plugin.request import Chunk


class Owner(Protocol):
    """Who passes a stream's wishes on to the engine: the backend."""

    def cancel(self, key: int) -> None: ...

    def stop_early(self, key: int) -> None: ...


class EngineStream:
    """A `TokenStream`. It holds at most `max_new_tokens` chunks, however slow its reader is."""

    __slots__ = ("_chunks", "_ended", "_error", "_owner", "_waiter", "key")

    def __init__(self, key: int, owner: Owner) -> None:
        self.key = key
        self._owner = owner
        self._chunks: deque[Chunk] = deque()
        self._error: RequestError | None = None
        self._ended = False  # nothing more will come
        self._waiter: asyncio.Future[None] | None = None

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if not self._ended:
            self._ended = True
            self._owner.cancel(self.key)

    def stop(self) -> None:
        """See `TokenStream.stop`."""
        if not self._ended:
            self._owner.stop_early(self.key)

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._chunks.popleft()

    def push(self, delta: Delta, batch_size: int) -> None:
        """Takes over what a step gave."""
        finish, waited = FINISH_REASONS[delta.finish], delta.queue_wait_us
        if delta.token == NO_TOKEN:  # no step and no token, hence no batch and no times of them
            chunk = Chunk((), delta.generated, 0, waited, None, None, finish)
        else:
            first, elapsed = delta.first, delta.elapsed_ms
            prefill, decode = (elapsed, None) if first else (None, elapsed)
            ids = (delta.token,)
            chunk = Chunk(ids, delta.generated, batch_size, waited, prefill, decode, finish)
        self._chunks.append(chunk)
        if delta.finish:
            self._ended = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        """The request ends with this, after the chunks that came before."""
        if not self._ended:
            self._ended, self._error = True, error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def error_of(failure: Failure) -> RequestError:
    """The exception that a failure on the link stands for."""
    if failure.kind == Overloaded.__name__:
        return Overloaded(failure.message, failure.retry_after)
    if failure.kind == RequestRefused.__name__:
        return RequestRefused(failure.message)
    return BackendFailed(failure.message)
