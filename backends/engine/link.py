"""The wire between the event loop and the engine process: a Unix socket pair.

A frame is a length (4 bytes, little endian) and a msgpack message. Compared with
ZeroMQ over ipc it gives the death of the other side as end of file at once, and needs no thread of
its own (`benchmarks/engine_link.py` compares their speed).
"""

from __future__ import annotations

import asyncio
import select
import socket
import threading
from collections.abc import Callable

import msgspec

from mindstream.backends.engine.messages import Command, Notice

_HEADER = 4
_READ = 1 << 18

_encoder = msgspec.msgpack.Encoder()


def frame(payload: bytes) -> bytes:
    """One frame, ready to send."""
    return len(payload).to_bytes(_HEADER, "little") + payload


class FrameReader:
    """Cuts a byte stream into the payloads of its frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= _HEADER:
            end = start + _HEADER + int.from_bytes(buffer[start : start + _HEADER], "little")
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + _HEADER : end]))
            start = end
        del buffer[:start]
        return payloads


class EngineEnd:
    """The engine process's end. `receive` belongs to one thread; any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def receive_blob(self) -> bytes:
        """The first frame, undecoded; waits for it. Raises EOFError if the other side is gone."""
        while True:
            payloads = self._reader.feed(self._read())
            if payloads:
                return payloads[0]

    def receive(self, *, wait: bool) -> list[Command]:
        """Commands that have arrived; with `wait` at least one. Raises EOFError."""
        commands: list[Command] = []
        while self._poll.poll(None if wait and not commands else 0):
            commands += [self._decoder.decode(p) for p in self._reader.feed(self._read())]
        return commands

    def _read(self) -> bytes:
        try:
            data = self._sock.recv(_READ)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the server's end of the link is closed")
        return data

    def send(self, notice: Notice) -> None:
        """Sends it whole; waits while the other side does not read. OSError if it is gone."""
        with self._lock:
            self._sock.sendall(frame(_encoder.encode(notice)))


class ServerEnd(asyncio.Protocol):
    """The event loop's end; hands over every notice, and the end of the link, by callback."""

    def __init__(self, on_notice: Callable[[Notice], None], on_lost: Callable[[], None]) -> None:
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(Notice)
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        for payload in self._reader.feed(data):
            self._on_notice(self._decoder.decode(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio, once."""
        self._transport = None
        self._on_lost()

    def send_blob(self, payload: bytes) -> None:
        """Queues a frame; what the engine has not read yet stays in this process's memory."""
        if self._transport is not None:
            self._transport.write(frame(payload))

    def send(self, command: Command) -> None:
        """Queues a command. Without effect when the link is lost: `on_lost` tells."""
        self.send_blob(_encoder.encode(command))

    def close(self) -> None:
        """The engine sees end of file."""
        if self._transport is not None:
            self._transport.close()
