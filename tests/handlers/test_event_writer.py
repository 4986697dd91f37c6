"""Straight to the socket or by way of Tornado's buffer: the bytes arrive as one stream."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tornado.iostream import IOStream, StreamClosedError

from mindstream.handlers.event_writer import write_chunk


async def sent_and_read(events: Sequence[bytes], pauses: Sequence[bool], chunked: bool) -> bytes:
    """Writes the events, waiting for the socket only at the pauses; returns what arrived."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    stream = IOStream(ours)
    reader, writer = await asyncio.open_unix_connection(sock=theirs)
    reading = asyncio.ensure_future(reader.read(-1)) if pauses[0] else None
    last = None
    for event, pause in zip(events, pauses, strict=True):
        last = write_chunk(stream, event, chunked=chunked) or last
        if pause:
            reading = reading or asyncio.ensure_future(reader.read(-1))
            if last is not None:
                await last
            await asyncio.sleep(0)
    reading = reading or asyncio.ensure_future(reader.read(-1))
    await stream.write(b"end")
    stream.close()
    try:
        return await reading
    finally:
        writer.close()
        await writer.wait_closed()


EVENTS = st.lists(
    st.tuples(st.integers(1, 20_000), st.booleans()), min_size=1, max_size=30
)  # sizes beyond the socket's buffer and below it


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.booleans())
def test_every_byte_arrives_in_order(drawn: list[tuple[int, bool]], chunked: bool) -> None:
    events = [bytes([65 + n % 26]) * size for n, (size, _) in enumerate(drawn)]
    arrived = asyncio.run(sent_and_read(events, [pause for _, pause in drawn], chunked))
    expected = b"".join(
        f"{len(event):x}\r\n".encode() + event + b"\r\n" if chunked else event for event in events
    )
    assert arrived == expected + b"end"


def test_nothing_overtakes_what_waits() -> None:
    async def run() -> tuple[bytes, bytes]:
        ours, theirs = socket.socketpair()
        stream = IOStream(ours)
        sent = b""
        while write_chunk(stream, b"x" * 4099, chunked=False) is None:
            sent += b"x" * 4099
        sent += b"x" * 4099 + b"y"
        theirs.setblocking(False)
        arrived = theirs.recv(1 << 20)  # room again, before the loop has heard of it
        last = write_chunk(stream, b"y", chunked=False)
        assert last is not None
        while len(arrived) < len(sent):
            arrived += await asyncio.get_running_loop().sock_recv(theirs, 1 << 20)
        await last
        stream.close()
        theirs.close()
        return arrived, sent

    arrived, sent = asyncio.run(asyncio.wait_for(run(), 20))
    assert arrived == sent


@pytest.mark.parametrize("full", [False, True])
def test_a_peer_that_left_is_told(full: bool) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        stream = IOStream(ours)
        if full:
            while write_chunk(stream, b"x" * 4096, chunked=True) is None:
                pass
        theirs.close()
        with pytest.raises(StreamClosedError):
            for _ in range(2):
                written = write_chunk(stream, b"x", chunked=True)
                if written is not None:
                    await written
        with pytest.raises(StreamClosedError):
            write_chunk(stream, b"x", chunked=True)

    asyncio.run(asyncio.wait_for(run(), 20))
