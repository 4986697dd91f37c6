"""Closed-loop load on the stream endpoint, with as little work an event as a client can do.

Raw asyncio protocols, no HTTP library: the bytes of a stream are counted where the system put them,
not copied and not parsed; of its events only the last one is read as JSON. On two cores a busier
client would measure itself.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from urllib.parse import urlsplit

# Two ends of a stream, each of which holds its last event.
_BUFFER_BYTES = 1 << 15


@dataclass(slots=True)
class Outcome:
    """One request. Times are perf_counter seconds; one arrival an event, one event a token."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    tokens: int = 0  # as the last event counts them
    finish_reason: str = ""
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to the first token."""
        return self.arrivals[0] - self.sent

    def gaps(self) -> Iterator[float]:
        """Seconds between neighbouring tokens."""
        return (b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False))


@dataclass(frozen=True, slots=True)
class Target:
    """Where the stream endpoint is."""

    host: str
    port: int
    model: str

    @classmethod
    def of(cls, url: str, model: str) -> Target:
        """`url`: http://host:port, without TLS."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"--url must be http://host:port, got {url!r}")
        return cls(parts.hostname, parts.port or 80, model)

    def request(self, prompt: str, max_new_tokens: int, **parameters: object) -> bytes:
        """The bytes of one generate_stream request; greedy unless `parameters` say otherwise."""
        chosen = {"details": True, "do_sample": False, "max_new_tokens": max_new_tokens}
        body = json.dumps({"text_input": prompt, "parameters": {**chosen, **parameters}}).encode()
        head = (
            f"POST /v2/models/{self.model}/generate_stream HTTP/1.1\r\n"
            f"Host: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Connection(asyncio.BufferedProtocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reusable = True
        self._outcome = Outcome(0.0)
        self._done: asyncio.Future[Outcome] | None = None
        self._head = b""
        self._streaming = False
        self._buffer = bytearray(_BUFFER_BYTES)  # the end of the stream so far
        self._filled = 0

    @property
    def outcome(self) -> Outcome:
        """The request under way, growing, or the last one."""
        return self._outcome

    async def ask(self, request: bytes) -> Outcome:
        """Sends one request and waits for the end of its stream."""
        if self.transport is None:
            raise RuntimeError("not connected")
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._streaming, self._filled = b"", False, 0
        self._outcome = Outcome(perf_counter())
        self.transport.write(request)
        return await self._done

    def close(self) -> None:
        """Ends the connection, and with it the request under way."""
        if self.transport is not None:
            self.transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # of create_connection always
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end(error="the connection closed before the stream ended")

    def get_buffer(self, sizehint: int) -> memoryview:
        half = _BUFFER_BYTES // 2
        if self._filled > half:
            self._buffer[:half] = self._buffer[self._filled - half : self._filled]
            self._filled = half
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        now = perf_counter()
        begin, self._filled = self._filled, self._filled + nbytes
        if not self._streaming:
            rest = self._read_head(bytes(self._buffer[begin : self._filled]))
            begin, self._filled = 0, len(rest or b"")
            if rest is None:
                return
            self._buffer[: self._filled] = rest
        # An event ends in an empty line; JSON has no raw line feed, chunk framing only CR LF.
        events = self._buffer.count(b"\n\n", max(begin - 1, 0), self._filled)
        self._outcome.arrivals.extend([now] * events)
        if self._buffer.endswith(b"\r\n0\r\n\r\n", 0, self._filled):
            self._read_last_event()

    def _read_head(self, data: bytes) -> bytes | None:
        """What follows the head of a stream, or None: not there yet, or not a stream."""
        self._head += data
        head, empty_line, rest = self._head.partition(b"\r\n\r\n")
        if not empty_line:
            return None
        if b"connection: close" in head.lower():
            self.reusable = False
        if b"text/event-stream" in head.lower() and head.split(b" ", 2)[1] == b"200":
            self._streaming = True
            return rest
        length = next(
            (int(v) for k, _, v in (line.partition(b":") for line in head.split(b"\r\n")[1:])
             if k.lower() == b"content-length"),
            0,
        )  # fmt: skip
        if len(rest) >= length:
            status = head.split(b"\r\n")[0].decode("latin-1")
            self._end(error=f"{status}: {rest[:200].decode('utf-8', 'replace')}")
        return None

    def _read_last_event(self) -> None:
        kept = bytes(self._buffer[: self._filled])
        event = kept.rpartition(b"data:")[2].partition(b"\n\n")[0]
        try:
            last = json.loads(event)
        except ValueError:
            self._end(error=f"the last event is not JSON: {event[:100]!r}")
            return
        details = last.get("details") or {}
        self._outcome.tokens = details.get("generated_tokens", 0)
        self._outcome.finish_reason = details.get("finish_reason") or ""
        if "error" in last:
            self._end(error=f"error event: {last['error']}")
        elif not self._outcome.finish_reason:
            self._end(error="the stream ended without a finish_reason")
        else:
            self._end()

    def _end(self, error: str = "") -> None:
        if self._done is not None and not self._done.done():
            self._outcome.ended = perf_counter()
            self._outcome.error = error
            self._done.set_result(self._outcome)


async def closed_loop(
    target: Target, requests: Sequence[bytes], streams: int
) -> tuple[list[Outcome], float]:
    """Keeps `streams` requests running until all are done; also gives the seconds it took."""
    waiting = iter(requests)
    outcomes: list[Outcome] = []

    async def stream() -> None:
        connection: Connection | None = None
        for request in waiting:
            try:
                if connection is None or not connection.reusable:
                    connection = await connect(target)
                outcomes.append(await connection.ask(request))
            except OSError as error:
                now = perf_counter()
                outcomes.append(Outcome(now, ended=now, error=f"no connection: {error}"))
        if connection is not None:
            connection.close()

    began = perf_counter()
    await asyncio.gather(*(stream() for _ in range(min(streams, len(requests)))))
    return outcomes, perf_counter() - began


@contextmanager
def standing_back() -> Iterator[None]:
    """This thread does not interrupt another when bytes arrive for it (Linux, SCHED_BATCH).

    For tokens/s on a machine that the client shares with the server: else each of 32 events a step
    takes the core from whoever sent it. Not for latencies: what arrives may be read a little later.
    """
    policy = getattr(os, "SCHED_BATCH", None)
    if policy is None:
        yield
        return
    before = os.sched_getscheduler(0)
    os.sched_setscheduler(0, policy, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, os.sched_param(0))


async def connect(target: Target) -> Connection:
    """A new connection; raises OSError."""
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, target.host, target.port)
    return connection
