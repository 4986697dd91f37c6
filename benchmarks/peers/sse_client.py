"""Streams from any server that sends one server-sent event a token, over raw asyncio."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any


@dataclass(frozen=True, slots=True)
class Streamed:
    """One finished stream. Times are perf_counter seconds."""

    began: float
    first: float  # the first event's bytes arrived
    last: float  # the last bytes with an event
    last_events: list[dict[str, Any]]  # the last two, without [DONE]


async def stream(port: int, path: str, body: dict[str, Any]) -> Streamed:
    """POSTs and reads to the end; raises RuntimeError for anything but a 200 with events.

    The events are parsed after the end only: a busy client would take time from the server.
    """
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    began = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + payload)
    answer = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answer.split(b"\r\n")[0]:
        raise RuntimeError(f"{path}: {answer[:200]!r} {await reader.read(300)!r}")
    chunked = b"chunked" in answer.lower()
    first, last, pieces = 0.0, 0.0, []
    while data := await reader.read(65536):
        if b"data: {" in data:
            last = perf_counter()
            first = first or last
        pieces.append(data)
    writer.close()
    if not first:
        raise RuntimeError(f"{path}: the stream had no event: {pieces[:1]!r}")
    text = b"".join(pieces)
    return Streamed(began, first, last, _last_events(_dechunked(text) if chunked else text))


def _dechunked(data: bytes) -> bytes:
    """The content of a body in HTTP's chunked coding."""
    content, at = [], 0
    while True:
        end = data.index(b"\r\n", at)
        size = int(data[at:end].partition(b";")[0], 16)
        if not size:
            return b"".join(content)
        content.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size + 2


def _last_events(text: bytes) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.startswith(b"data: {")]
    return [json.loads(line[6:]) for line in lines[-2:]]


async def together(
    port: int, path: str, bodies: list[dict[str, Any]]
) -> tuple[list[Streamed], float]:
    """All at once; the seconds until the last has ended."""
    began = perf_counter()
    results = await asyncio.gather(*(stream(port, path, body) for body in bodies))
    return list(results), perf_counter() - began
