"""Answers with the prompt in capitals, one byte a token: a backend that has no engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from time import perf_counter
from types import TracebackType

from mindstream.plugin.backend import BackendStatus, Limits, State
from mindstream.plugin.errors import Overloaded, ServiceStopped
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import Chunk, FinishReason, GenerationRequest


class UppercaseBackend:
    """Lives on the event loop alone, so there is nothing to lock."""

    limits = Limits(vocab_size=256, max_seq_len=4096, max_batch_size=64)

    def __init__(self, deployment: Deployment) -> None:
        self.running: set[Answer] = set()
        self._room = self.limits.max_batch_size + deployment.serving.max_waiting
        self._state = State.STARTING

    async def start(self) -> None:
        self._state = State.READY

    def submit(self, request: GenerationRequest) -> Answer:
        if self._state is not State.READY:
            raise ServiceStopped("The service has been stopped")
        if len(self.running) >= self._room:
            raise Overloaded(f"{self._room} requests run and wait already.")
        return Answer(self, request)

    def status(self) -> BackendStatus:
        return BackendStatus(self._state, running=len(self.running))

    async def stop(self, *, drain: bool) -> None:
        self._state = State.STOPPED
        for answer in () if drain else tuple(self.running):
            answer.stop()
        while drain and self.running:  # noqa: ASYNC110 - a real backend waits for an event
            await asyncio.sleep(0.01)


class Answer:
    """One request. `async with` holds its place in the backend, `async for` gives its tokens."""

    def __init__(self, backend: UppercaseBackend, request: GenerationRequest) -> None:
        self._backend, self._request = backend, request
        self._clock = perf_counter()
        self._stopped = False
        self._chunks = self._generate()

    async def __aenter__(self) -> AsyncIterator[Chunk]:
        self._backend.running.add(self)
        return self._chunks

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._backend.running.discard(self)
        await self._chunks.aclose()

    def stop(self) -> None:
        self._stopped = True

    async def _generate(self) -> AsyncGenerator[Chunk, None]:
        count = self._request.generated_before  # above 0 if it continues an earlier request
        prompt = self._request.prompt_ids[: len(self._request.prompt_ids) - count]
        answer = bytes(prompt).upper()[: self._request.max_new_tokens]
        end = FinishReason.EOS if len(answer) == len(prompt) else FinishReason.LENGTH
        while count < len(answer) and not self._stopped:
            await asyncio.sleep(0)  # where a real backend waits for its model
            count += 1
            reason = end if count == len(answer) else None
            yield self._chunk((answer[count - 1],), count, reason)
        if self._stopped and count < len(answer):
            yield self._chunk((), count, FinishReason.STOP)
        elif count == self._request.generated_before:
            yield self._chunk((), count, end)

    def _chunk(self, ids: tuple[int, ...], count: int, reason: FinishReason | None) -> Chunk:
        began, self._clock = self._clock, perf_counter()
        took = (self._clock - began) * 1000
        first = count <= self._request.generated_before + 1
        return Chunk(
            token_ids=ids,
            generated_tokens=count,
            batch_size=len(self._backend.running),
            queue_wait_us=0,
            prefill_ms=took if first else None,
            decode_ms=None if first else took,
            finish_reason=reason,
        )
