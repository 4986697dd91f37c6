"""A backend that does what a test says. `pytest_plugins = ["mindstream.plugin.testing"]` gives the
fixtures; authors of backends and handlers use the classes.

    backend.enqueue(72, 105, FinishReason.EOS)     # the next request gets these and ends
    backend.enqueue(72, Delay(0.1), BackendFailed("broke"))
    backend.enqueue(72, backend.gate(), 105)       # waits until the gate is set

Everything runs on the event loop; no threads, no clock but the event loop's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

import pytest

from mindstream.plugin.backend import Backend, BackendStatus, Limits, State
from mindstream.plugin.defaults import resolve_defaults
from mindstream.plugin.errors import RequestError, ServiceStopped
from mindstream.plugin.model_config import Deployment, load_deployment
from mindstream.plugin.request import Chunk, FinishReason, GenerationRequest
from mindstream.plugin.service import ModelService
from mindstream.plugin.tokenizer import BytesTokenizer, Tokenizer

B = TypeVar("B", bound=Backend)


@asynccontextmanager
async def started(backend: B) -> AsyncIterator[B]:
    """The backend, ready; stopped at the end without waiting for what still runs."""
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop(drain=False)


@dataclass(frozen=True, slots=True)
class Delay:
    """Seconds of waiting before the next item."""

    seconds: float


Item = int | bytes | str | Delay | asyncio.Event | FinishReason | RequestError | Chunk


class ScriptedStream:
    """One request of a ScriptedBackend, and its iterator."""

    def __init__(self, backend: ScriptedBackend, request: GenerationRequest) -> None:
        self._backend = backend
        self._request = request
        self._items = backend.next_script(request)
        self._generated = request.generated_before
        self._stop = asyncio.Event()
        self._ended = False

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._backend.leave(self._request, ended=self._ended)

    def stop(self) -> None:
        self._stop.set()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        while self._items and not self._ended:
            item = self._items.popleft()
            if isinstance(item, Delay):
                await self._wait(asyncio.sleep(item.seconds))
            elif isinstance(item, asyncio.Event):
                await self._wait(item.wait())
            if self._stop.is_set():
                return self._last(FinishReason.STOP)
            if isinstance(item, RequestError):
                self._ended = True
                raise item
            if isinstance(item, FinishReason):
                return self._last(item)
            if isinstance(item, Chunk):
                self._ended = item.finish_reason is not None
                return item
            if isinstance(item, int):
                return self._token(item)
        raise StopAsyncIteration

    async def _wait(self, waiting: object) -> None:
        tasks = {asyncio.ensure_future(waiting), asyncio.ensure_future(self._stop.wait())}  # type: ignore[call-overload]  # any awaitable
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    def _token(self, token_id: int) -> Chunk:
        """The token; with the reason, if the script names one right behind it."""
        first = self._generated == self._request.generated_before
        self._generated += 1
        chunk = Chunk(
            token_ids=(token_id,),
            generated_tokens=self._generated,
            batch_size=self._backend.status().running,
            queue_wait_us=10 * self._generated,
            prefill_ms=1.5 if first else None,
            decode_ms=None if first else 0.5,
        )
        reason = self._items[0] if self._items else None
        if isinstance(reason, FinishReason):
            self._ended = True
            return replace(chunk, finish_reason=reason)
        return chunk

    def _last(self, reason: FinishReason) -> Chunk:
        self._ended = True
        return Chunk((), self._generated, self._backend.status().running, 0, None, 0.5, reason)


class ScriptedBackend:
    """Gives each submitted request the next enqueued script.

    `requests` are the submitted ones in order, `cancelled` the ids of those whose block was left
    before the end. `submit_error` is raised by every `submit` while set; `state` is what `status`
    shows.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits(vocab_size=256, max_seq_len=1024, max_batch_size=8)
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.submit_error: RequestError | None = None
        self.state = State.STARTING
        self._scripts: deque[deque[Item]] = deque()
        self._running: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def enqueue(self, *items: Item) -> None:
        """The script of one request. Text and bytes become one token a byte.

        A script without a FinishReason or error breaks the contract on purpose: it just ends.
        """
        script: deque[Item] = deque()
        for item in items:
            raw = item.encode() if type(item) is str else item
            script.extend(raw) if isinstance(raw, bytes) else script.append(raw)
        self._scripts.append(script)

    @staticmethod
    def gate() -> asyncio.Event:
        """An item at which the script waits until `set()`."""
        return asyncio.Event()

    def next_script(self, request: GenerationRequest) -> deque[Item]:
        """Without one enqueued: the prompt comes back, cut to max_new_tokens."""
        if self._scripts:
            return self._scripts.popleft()
        return deque([*request.prompt_ids[: request.max_new_tokens], FinishReason.LENGTH])

    async def start(self) -> None:
        self.state = State.READY

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        if self.submit_error is not None:
            raise self.submit_error
        if self.state is State.STOPPED:
            raise ServiceStopped("The service has been stopped")
        self.requests.append(request)
        self._running.add(request.request_id)
        self._idle.clear()
        return ScriptedStream(self, request)

    def leave(self, request: GenerationRequest, *, ended: bool) -> None:
        """Called by the stream when its block is left."""
        if not ended:
            self.cancelled.append(request.request_id)
        self._running.discard(request.request_id)
        if not self._running:
            self._idle.set()

    def status(self) -> BackendStatus:
        return BackendStatus(self.state, running=len(self._running))

    async def stop(self, *, drain: bool) -> None:
        self.state = State.STOPPED
        if drain:
            await self._idle.wait()


def scripted_service(
    backend: ScriptedBackend,
    deployment: Deployment | None = None,
    tokenizer: Tokenizer | None = None,
) -> ModelService:
    """A service over it, not yet started; by default of the `echo` deployment, bytes as tokens."""
    deployment = deployment or load_deployment("echo")
    return ModelService(
        deployment, tokenizer or BytesTokenizer(), backend, resolve_defaults(deployment)
    )


@pytest.fixture
def scripted_backend() -> ScriptedBackend:
    """Without scripts it echoes the prompt."""
    return ScriptedBackend()
