"""Streams from any server that sends one server-sent event a token, over raw asyncio."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from time import perf_counter
from typing import Any


@dataclass(frozen=True, slots=True)
class Streamed:
    """One finished stream."""

    seconds_to_first: float
    events: int


async def stream(port: int, path: str, body: dict[str, Any]) -> Streamed:
    """POSTs and reads to the end; raises RuntimeError for anything but a 200 with events."""
    payload = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    began = perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode() + payload)
    answer = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in answer.split(b"\r\n")[0]:
        raise RuntimeError(f"{path}: {answer[:200]!r} {await reader.read(300)!r}")
    first, events, last = 0.0, 0, b""
    while data := await reader.read(65536):
        found = (last + data).count(b"data: ")
        if found and not events:
            first = perf_counter() - began
        events += found
        last = data[-5:]
    writer.close()
    if not events:
        raise RuntimeError(f"{path}: the stream had no event")
    return Streamed(first, events)


async def together(port: int, path: str, bodies: list[dict[str, Any]]) -> tuple[int, float, float]:
    """All at once: events in all, seconds until the last ended, seconds to the first event."""
    began = perf_counter()
    results = await asyncio.gather(*(stream(port, path, body) for body in bodies))
    seconds = perf_counter() - began
    return sum(r.events for r in results), seconds, min(r.seconds_to_first for r in results)
