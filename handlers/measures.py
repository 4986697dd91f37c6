"""What the server measures of its requests, for `GET /metrics`. Event loop only.

Counts are kept here and handed out when somebody asks: a token costs one bisection, not a locked
object of the metrics library.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from mindstream.plugin.request import Chunk, GenerationRequest
from mindstream.plugin.service import TextChunk

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LATENCY = (1, 2.5, 5, 10, 15, 20, 30, 40, 50, 60)
_LENGTH = (
    *(10, 50, 100, 200, 500, 1000, 2000, 5000, 10000),
    *(16000, 20000, 32000, 50000, 64000, 128000),
)
_WINDOW = 60.0  # seconds


class Histogram:
    """Counts of values by upper bound, the last one without any."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more value; equal to a bound is below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """[(upper bound, values up to it)] and the sum of all values."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


class Pace:
    """Tokens a second, from looks at a counter."""

    def __init__(self) -> None:
        self._looks = deque([(time.monotonic(), 0)])

    def look(self, tokens: int) -> float:
        """The mean of the last minute, or since the last look if that is longer ago."""
        now = time.monotonic()
        while len(self._looks) > 1 and self._looks[1][0] <= now - _WINDOW:
            self._looks.popleft()
        since, before = self._looks[0]
        self._looks.append((now, tokens))
        return (tokens - before) / max(now - since, 1e-3)


class ModelMeasures:
    """What this server measured of one model's requests."""

    def __init__(self) -> None:
        self.received = self.succeeded = self.failed = 0
        self.time_to_first_token = Histogram(_TTFT)
        self.time_per_output_token = Histogram(_TOKEN)
        self.latency = Histogram(_LATENCY)
        self.prompt_tokens = Histogram(_LENGTH)
        self.generated_tokens = Histogram(_LENGTH)
        self.prompt_pace = Pace()
        self.generation_pace = Pace()


class RequestMeasure:
    """One request, from its parsed body to the end of its reply."""

    def __init__(self, model: ModelMeasures) -> None:
        self._model = model
        self._began = time.monotonic()
        self._finished = False
        model.received += 1

    @asynccontextmanager
    async def watch(
        self,
        source: AbstractAsyncContextManager[AsyncIterator[TextChunk]],
        request: GenerationRequest,
    ) -> AsyncIterator[AsyncIterator[TextChunk]]:
        """`source`, looked at on its way through."""
        async with source as chunks:
            yield _Watched(chunks, self, request)

    def look(self, chunk: Chunk, request: GenerationRequest) -> None:
        """One step's outcome. The times are the engine's: no client can slow them down."""
        if chunk.decode_ms is not None:
            if chunk.token_ids:
                self._model.time_per_output_token.observe(chunk.decode_ms / 1000)
        elif chunk.prefill_ms is not None:
            self._model.time_to_first_token.observe(chunk.prefill_ms / 1000)
        if chunk.finish_reason is not None:
            self._finish(chunk, request)

    def _finish(self, last: Chunk, request: GenerationRequest) -> None:
        self._finished = True
        self._model.latency.observe(time.monotonic() - self._began)
        self._model.prompt_tokens.observe(len(request.prompt_ids) - request.generated_before)
        self._model.generated_tokens.observe(last.generated_tokens - request.generated_before)

    def end(self, *, failed: bool) -> None:
        """The reply is out. A request whose client left neither failed nor succeeded."""
        if failed:
            self._model.failed += 1
        elif self._finished:
            self._model.succeeded += 1


class _Watched:
    """The chunks of one request; a plain iterator, since it runs once a token."""

    def __init__(
        self,
        chunks: AsyncIterator[TextChunk],
        measure: RequestMeasure,
        request: GenerationRequest,
    ) -> None:
        self._chunks = chunks
        self._measure = measure
        self._request = request

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self

    async def __anext__(self) -> TextChunk:
        piece = await self._chunks.__anext__()
        self._measure.look(piece.chunk, self._request)
        return piece
