"""`Retry-After` of a refusal: the mean interval at which requests end, from Pace to the header."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from mindstream.backends.echo import EchoBackend
from mindstream.backends.engine.stats import Pace
from mindstream.plugin.app import make_app, make_server
from mindstream.plugin.defaults import resolve_defaults
from mindstream.plugin.errors import Overloaded
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.service import ModelService
from mindstream.plugin.tokenizer import BytesTokenizer


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pace_of(intervals: Sequence[float], clock: Clock | None = None) -> Pace:
    """After requests that ended at these intervals."""
    clock = clock or Clock()
    pace = Pace(clock)
    pace.busy()
    for interval in intervals:
        clock.now += interval
        pace.ended()
    return pace


def test_before_any_request_has_ended_it_is_the_least() -> None:
    clock = Clock()
    pace = pace_of([], clock)
    clock.now += 1e6
    assert pace.retry_after == 1


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(0.0, 1), (0.02, 1), (1.0, 1), (1.25, 2), (7.5, 8), (59.5, 60), (61.0, 60), (1e6, 60)],
)
@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_regular_ends_give_their_interval_rounded_up_within_1_and_60(
    interval: float, expected: int, count: int
) -> None:
    assert pace_of([interval] * count).retry_after == expected


def test_it_is_a_mean_and_not_the_last_interval() -> None:
    """Three that end together every 15 s make room every 5 s."""
    assert 4 <= pace_of([0.0, 0.0, 15.0] * 60).retry_after <= 8
    assert 2 <= pace_of([15.0, 0.0, 0.0] * 60).retry_after <= 5


def test_it_follows_a_change_within_some_dozens_of_ends() -> None:
    assert pace_of([0.1] * 500 + [30.0] * 40).retry_after in (29, 30)
    assert pace_of([30.0] * 500 + [0.1] * 60).retry_after == 1


def test_time_without_any_request_does_not_count() -> None:
    clock = Clock()
    pace = pace_of([2.5, 2.5], clock)
    clock.now += 50_000
    pace.busy()
    clock.now += 2.5
    pace.ended()
    assert pace.retry_after == 3


async def post(port: int, path: str, body: bytes) -> str:
    """The head of the reply, in lower case."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    reply = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    writer.close()
    return reply.decode().lower()


@pytest.mark.parametrize("path", ["generate", "generate_stream"])
async def test_a_refusal_carries_the_pace_of_the_requests_before_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request took 17 s of a clock that only the requests move; a night passed in between.

    The engine is stopped so that the queue stays full.
    """
    clock = Clock()
    monkeypatch.setattr("mindstream.backends.engine.backend.Pace", lambda: Pace(clock))
    deployment = load_deployment("echo", {"max_batch_size": "1", "max_waiting": "3"})
    backend = EchoBackend(deployment)

    def request(name: str) -> GenerationRequest:
        return GenerationRequest(name, tuple(name.encode()), 100)

    service = ModelService(deployment, BytesTokenizer(), backend, resolve_defaults(deployment))
    async with AsyncExitStack() as full:
        await service.start()
        full.push_async_callback(service.stop, drain=False)
        for name in "abc":
            clock.now += 50_000
            async with backend.submit(request(name)) as chunks:
                clock.now += 17
                assert [chunk async for chunk in chunks][-1].finish_reason is not None
        assert backend.engine_pid is not None
        os.kill(backend.engine_pid, signal.SIGSTOP)
        full.callback(os.kill, backend.engine_pid, signal.SIGCONT)
        with pytest.raises(Overloaded) as caught:
            for number in itertools.count():
                await full.enter_async_context(backend.submit(request(str(number))))
        assert caught.value.retry_after == 17

        server = make_server(make_app([service]))
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        server.add_sockets([listener])
        port = listener.getsockname()[1]
        reply = await post(port, f"/v2/models/echo/{path}", b'{"text_input": "late"}')
        server.stop()
        await server.close_all_connections()
    assert reply.startswith("http/1.1 503 ")
    assert "\r\nretry-after: 17\r\n" in reply
