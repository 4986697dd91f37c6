"""The link between event loop and engine process: our Unix socket pair against ZeroMQ over ipc.

    python benchmarks/engine_link.py

The other process sends reports of 32 and 256 deltas as fast as it can; this one decodes them on an
asyncio loop. Printed: reports a second, and the median round trip of one small message. Both sides
use the same messages and the same msgspec encoding; only the transport differs.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from mindstream.backends.engine.link import EngineEnd, ServerEnd
from mindstream.backends.engine.messages import (
    Command,
    Delta,
    Notice,
    Ping,
    Report,
    Shutdown,
    Stats,
)

REPORTS = 4000
ROUND_TRIPS = 2000


def make_report(size: int) -> Report:
    return Report(size, [Delta(k, 1234, 17, 250, False, 12.3, 0) for k in range(size)], [], Stats())


def socket_engine(sock: socket.socket, size: int) -> None:
    link, full, small = EngineEnd(sock), make_report(size), make_report(0)
    while True:
        for command in link.receive(wait=True):
            if isinstance(command, Shutdown):
                for _ in range(REPORTS):
                    link.send(full)
                return
            link.send(small)


def zmq_engine(address: str, size: int) -> None:
    # Its own context, ended by hand: what an instance() still has to send is dropped at exit.
    with zmq.Context() as context, context.socket(zmq.PAIR) as pair:
        pair.connect(address)
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Command)
        full, small = make_report(size), make_report(0)
        while not isinstance(decoder.decode(pair.recv()), Shutdown):
            pair.send(encoder.encode(small))
        for _ in range(REPORTS):
            pair.send(encoder.encode(full))


Send = Callable[[Command], Coroutine[Any, Any, None]]
Receive = Callable[[], Coroutine[Any, Any, object]]


async def measure(send: Send, receive: Receive) -> tuple[float, float]:
    """(reports a second, median round trip in microseconds)."""
    trips = []
    for _ in range(ROUND_TRIPS):
        began = time.perf_counter()
        await send(Ping())
        await receive()
        trips.append(time.perf_counter() - began)
    began = time.perf_counter()
    await send(Shutdown())
    for _ in range(REPORTS):
        await receive()
    return REPORTS / (time.perf_counter() - began), median(trips) * 1e6


async def over_socket(size: int) -> tuple[float, float]:
    mine, theirs = socket.socketpair()
    process = multiprocessing.get_context("spawn").Process(
        target=socket_engine, args=(theirs, size)
    )
    process.start()
    queue: asyncio.Queue[Notice] = asyncio.Queue()
    end = ServerEnd(queue.put_nowait, lambda: None)
    await asyncio.get_running_loop().create_unix_connection(lambda: end, sock=mine)

    async def send(command: Command) -> None:
        end.send(command)

    result = await measure(send, queue.get)
    end.close()
    process.join()
    theirs.close()
    return result


async def over_zmq(size: int) -> tuple[float, float]:
    context = zmq.asyncio.Context()
    pair = context.socket(zmq.PAIR)
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/link"
        pair.bind(address)
        process = multiprocessing.get_context("spawn").Process(
            target=zmq_engine, args=(address, size)
        )
        process.start()
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Notice)

        async def send(command: Command) -> None:
            await pair.send(encoder.encode(command))

        async def receive() -> object:
            return decoder.decode(await pair.recv())

        result = await measure(send, receive)
        process.join()
        pair.close()
        context.term()
    return result


def main() -> None:
    """Prints a table; the two take turns."""
    print(
        f"{'deltas':>6} {'transport':12} {'reports/s':>10} {'deltas/s':>12} {'round trip us':>14}"
    )
    for size in (32, 256):
        for name, run in (("socket pair", over_socket), ("zmq ipc", over_zmq)) * 2:
            rate, trip = asyncio.run(run(size))
            print(f"{size:6} {name:12} {rate:10.0f} {rate * size:12.0f} {trip:14.0f}")


if __name__ == "__main__":
    main()
