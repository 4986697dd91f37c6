"""`mindstream serve` as it runs: engines killed and frozen, full queues, hundreds of streams.

Real processes and real sockets. Where a test must know that something has happened, it asks the
server (`/metrics`, slots) instead of waiting for a while: the machine may be busy.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mindstream.backends.engine.testing import is_alive

Serve = Callable[..., Any]
Json = dict[str, Any]


@dataclass
class Reply:
    """What came back; `events` of a stream that ended as chunked bodies do."""

    status: int
    headers: dict[str, str]
    body: bytes = b""
    events: list[Json] = field(default_factory=list)

    def json(self) -> Json:
        found: Json = json.loads(self.body)
        return found

    @property
    def text(self) -> str:
        """The whole output of a request that ended well."""
        if not self.events:
            assert self.status == 200, self.body
            return str(self.json()["text_output"])
        assert all("error" not in event for event in self.events), self.events[-1]
        assert "finish_reason" in self.events[-1]["details"]
        return "".join(event["text_output"] for event in self.events)


class Client:
    """One model of one server."""

    def __init__(self, url: str, model: str = "echo") -> None:
        self.port = int(url.rpartition(":")[2])
        self.model = model

    @asynccontextmanager
    async def opened(
        self, method: str, path: str, body: Json | None = None, *, receive_bytes: int = 2**20
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection with the request sent; left early, it is cut."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            data = b"" if body is None else json.dumps(body).encode()
            writer.write(
                f"{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
                f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            yield reader, writer
        finally:
            writer.transport.abort()

    async def send(self, method: str, path: str, body: Json | None = None) -> Reply:
        async with self.opened(method, path, body) as (reader, _):
            reply = await read_head(reader)
            if "chunked" in reply.headers.get("transfer-encoding", ""):
                async for event in read_events(reader):
                    reply.events.append(event)
            else:
                reply.body = await reader.readexactly(int(reply.headers["content-length"]))
            return reply

    async def ask(self, text: str, *, stream: bool = True, new: int = 512, **more: Any) -> Reply:
        """Generates; `more` are parameters."""
        return await self.send("POST", self.route(stream), body_of(text, new, **more))

    def route(self, stream: bool) -> str:
        return f"/v2/models/{self.model}/generate" + ("_stream" if stream else "")

    async def status_of(self, path: str) -> int:
        return (await self.send("GET", path)).status

    async def metric(self, name: str) -> float:
        text = (await self.send("GET", "/metrics")).body.decode()
        found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, text
        return float(found[1])

    async def check_all_free(self, tokens: int) -> None:
        """Every slot and every KV block."""
        path = f"/v2/models/{self.model}/getSlotCount"

        async def free() -> bool:
            slots = (await self.send("GET", path)).json()
            idle = slots["free_slots"] == slots["total_slots"]
            return bool(idle and slots["available_tokens_length"] == tokens)

        await eventually(free)
        assert await self.metric("num_requests_waiting") == 0


def body_of(text: str, new: int, **more: Any) -> Json:
    return {"text_input": text, "parameters": {"max_new_tokens": new, "details": True, **more}}


async def read_head(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return Reply(int(head[0].split()[1]), headers)


async def read_events(reader: asyncio.StreamReader) -> AsyncIterator[Json]:
    """Every event, each a whole chunk; the body must end as it should."""
    while size := int(await read_line(reader), 16):
        chunk = await reader.readexactly(size + 2)
        assert chunk.startswith(b"data:{") and chunk.endswith(b"}\n\n\r\n")
        yield json.loads(chunk[5:-4])
    assert await read_line(reader) == b"\r\n"


async def read_line(reader: asyncio.StreamReader) -> bytes:
    """Raises IncompleteReadError where the server cut the connection."""
    return await reader.readuntil(b"\n")


async def eventually(holds: Callable[[], Awaitable[bool]], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < until, "it never came to hold"
        await asyncio.sleep(0.02)


def engines_of(server: Any) -> list[int]:
    """Process ids; between a crash and the restart there is none."""
    found = []
    for task in Path(f"/proc/{server.process.pid}/task").glob("*/children"):
        for child in task.read_text().split():
            with suppress(OSError):  # it may end while we look
                if b"backends.engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def engine_of(server: Any) -> int:
    """Process id of the server's engine."""
    (engine,) = engines_of(server)
    return engine


async def gone(pid: int) -> None:
    async def dead() -> bool:
        return not is_alive(pid)

    await eventually(dead)


class TestEngineDies:
    async def test_streams_end_at_once_and_it_comes_back(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--set", "echo.delay_ms=50")
        client = Client(server.url)
        streams = [asyncio.ensure_future(client.ask(f"{n}" * 300)) for n in range(8)]
        await eventually(streaming(client, 8))
        # While it goes on: how long a request takes that needs no engine, here and now.
        slowest, ended = 0.0, False

        async def probe() -> None:
            nonlocal slowest
            while not ended:
                began = time.monotonic()
                assert await client.status_of("/v2/health/live") == 200
                slowest = max(slowest, time.monotonic() - began)

        probing = asyncio.ensure_future(probe())
        killed = time.monotonic()
        os.kill(engine_of(server), signal.SIGKILL)
        replies = await asyncio.gather(*streams)
        took = time.monotonic() - killed
        assert await client.status_of("/v2/health/ready") == 503  # so the restart was not awaited
        slots = (await client.send("GET", f"/v2/models/{client.model}/getSlotCount")).json()
        assert slots["free_slots"] == slots["available_tokens_length"] == 0
        ended = True
        await probing
        assert took < 1.0 + slowest
        for reply in replies:
            *_, last = reply.events
            assert reply.status == 200 and list(last) == ["id", "error", "error_type"]
            assert "engine broke" in last["error"] and last["error_type"] == "Incomplete Generation"
        refused = await client.ask("too early")
        if refused.status != 200:  # the engine may be back by now
            check_refusal(refused, "restarted")

        async def ready() -> bool:
            return await client.status_of("/v2/health/ready") == 200

        await eventually(ready)
        assert (await client.ask("back again")).text == "back again"
        await client.check_all_free(4096 * 16)
        assert server.stop() == 0

    async def test_after_too_many_crashes_it_stays_down(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--set", "engine_restarts=2")
        client = Client(server.url)
        first = engine_of(server)
        os.kill(first, signal.SIGKILL)

        async def replaced() -> bool:
            ready = await client.status_of("/v2/health/ready") == 200
            return ready and bool(set(engines_of(server)) - {first})

        await gone(first)
        await eventually(replaced)
        assert (await client.ask("x")).text == "x"
        os.kill(engine_of(server), signal.SIGKILL)

        async def down() -> bool:
            return await client.status_of("/v2/health/ready") == 500

        await eventually(down)
        for stream in (True, False):
            reply = await client.ask("x", stream=stream)
            assert reply.status == 500
            assert re.search(
                r"engine.*signal 9|SIGKILL", reply.json()["error"]
            ) and "serving.engine_restarts 2" in str(reply.json())
        for path in ("/v2/models/echo/ready", "/health"):
            said = await client.send("GET", path)
            assert said.status == 500 and "serving.engine_restarts 2" in said.json()["error"]
        assert await client.status_of("/v2/health/live") == 500
        assert server.stop() == 0

    async def test_frozen_it_keeps_no_request_longer_than_its_timeout(
        self, serve_process: Serve
    ) -> None:
        server = serve_process("echo", "--set", "echo.delay_ms=20")
        client = Client(server.url)
        running_ones = [asyncio.ensure_future(client.ask("x" * 400, timeout=1)) for _ in range(4)]
        await eventually(streaming(client, 4))
        os.kill(engine_of(server), signal.SIGSTOP)
        late = [asyncio.ensure_future(client.ask("y", stream=s, timeout=1)) for s in (True, False)]
        timeout = "Engine callback timeout: client timeout"
        for reply in await asyncio.gather(*running_ones):
            *_, last = reply.events
            assert (last["error"], last["error_type"]) == (timeout, "Incomplete Generation")
        for reply in await asyncio.gather(*late):  # nothing was sent yet: a status of its own
            assert (reply.status, reply.json()["error"]) == (500, timeout)
        assert await client.status_of("/v2/health/live") == 200
        os.kill(engine_of(server), signal.SIGCONT)
        assert (await client.ask("thawed")).text == "thawed"
        await client.check_all_free(4096 * 16)


class TestServerEnds:
    async def test_sigterm_lets_running_and_waiting_requests_end(
        self, serve_process: Serve
    ) -> None:
        server = serve_process("echo", "--set", "max_batch_size=4", "--set", "echo.delay_ms=10")
        client, engine = Client(server.url), engine_of(server)
        texts = [f"{n:02} " * 20 for n in range(10)]
        asked = [
            asyncio.ensure_future(client.ask(text, stream=n % 3 > 0))
            for n, text in enumerate(texts)
        ]
        await eventually(waiting(client, 6))
        server.process.send_signal(signal.SIGTERM)
        assert [reply.text for reply in await asyncio.gather(*asked)] == texts
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        await gone(engine)

    @pytest.mark.parametrize("reads", [True, False])
    async def test_sigterm_waits_for_a_slow_reader(self, serve_process: Serve, reads: bool) -> None:
        """The engine is done long before a client that leaves more unread than the system holds."""
        big = ("--set", "max_iter_times=0", "--set", "full_text_enabled=true")
        limit = ("--set", f"drain_timeout={60 if reads else 1}")
        server = serve_process("echo", *big, *limit)
        client, size = Client(server.url), 6000
        body = body_of("x" * size, size)
        async with client.opened("POST", client.route(True), body, receive_bytes=2**16) as (r, _):
            assert (await read_head(r)).status == 200
            await client.check_all_free(4096 * 16)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(1)
            if reads:
                events = [event async for event in read_events(r)]
                assert len(events) == size
                assert events[-1]["text_output"] == "x" * size
            assert await asyncio.to_thread(server.process.wait, 30) == 0

    async def test_sigkill_leaves_no_engine(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--set", "echo.delay_ms=100")
        client, engine = Client(server.url), engine_of(server)
        asked = asyncio.ensure_future(client.ask("x" * 300))
        await eventually(streaming(client, 1))
        server.stop(signal.SIGKILL)
        await gone(engine)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asked


class TestFull:
    async def test_memory_for_few_serves_all(self, serve_process: Serve) -> None:
        """About four of the forty fit into the KV cache at once."""
        sizes = ("--set", "echo.num_blocks=40", "--set", "echo.block_size=8")
        server = serve_process("echo", *sizes)
        client = Client(server.url)
        texts = [f"{n:02}" * (25 + n % 5) for n in range(40)]
        replies = await asyncio.gather(*(client.ask(t, stream=len(t) % 3 > 0) for t in texts))
        assert [reply.text for reply in replies] == texts
        assert await client.metric("num_preemptions_total") > 0
        await client.check_all_free(40 * 8)

    async def test_beyond_the_queue_a_request_is_refused_at_once(
        self, serve_process: Serve
    ) -> None:
        limits = ("--set", "max_batch_size=1", "--set", "max_waiting=2")
        server = serve_process("echo", *limits, "--set", "echo.delay_ms=20")
        client = Client(server.url)
        texts = [f"{n}" * 100 for n in range(3)]
        taken = [asyncio.ensure_future(client.ask(text)) for text in texts]
        await eventually(waiting(client, 2))
        for stream in (True, False):
            check_refusal(await client.ask("one too many", stream=stream), "max_waiting")
        ready = await client.send("GET", "/v2/health/ready")
        assert ready.status == 503 and "busy" in ready.json()["message"]
        assert await client.status_of("/v2/health/live") == 200
        assert not any(task.done() for task in taken)  # nobody had to end for that
        assert [reply.text for reply in await asyncio.gather(*taken)] == texts
        assert (await client.ask("room again")).text == "room again"

    async def test_priority_goes_before_arrival(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--set", "max_batch_size=1", "--set", "echo.delay_ms=20")
        client = Client(server.url)
        # The most urgent: it gives way to nobody.
        blocker = asyncio.ensure_future(client.ask("x" * 512, priority=1))
        await eventually(running(client, 1))
        order: list[tuple[int, int]] = []

        async def take(priority: int, arrival: int) -> None:
            await client.ask("ab", priority=priority)
            order.append((priority, arrival))

        asked = []
        for arrival, priority in enumerate((5, 3, 1, 3, 2, 4, 1)):
            asked.append(asyncio.ensure_future(take(priority, arrival)))
            await eventually(waiting(client, arrival + 1))
        running_id = {"id": "endpoint_common_0"}
        assert (await client.send("POST", "/v2/models/echo/stopInfer", running_id)).status == 200
        assert (await blocker).events[-1]["details"]["finish_reason"] == "stop_sequence"
        await asyncio.gather(*asked)
        assert order == sorted(order)


def streaming(client: Client, number: int) -> Callable[[], Awaitable[bool]]:
    """The server's first requests, each with an event sent: its status is fixed."""

    async def holds() -> bool:
        return await client.metric("time_to_first_token_seconds_count") == number

    return holds


def running(client: Client, number: int) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return await client.metric("num_requests_running") == number

    return holds


def waiting(client: Client, number: int) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        return await client.metric("num_requests_waiting") == number

    return holds


def check_refusal(reply: Reply, word: str) -> None:
    assert reply.status == 503 and int(reply.headers["retry-after"]) >= 1
    assert list(reply.json()) == ["error", "error_type"]
    assert word in reply.json()["error"] and reply.json()["error_type"] == "Service Unavailable"


class TestMany:
    async def test_256_streams_at_once(self, serve_process: Serve) -> None:
        server = serve_process("echo", "--set", "max_batched_tokens=8192")
        client, engine = Client(server.url), engine_of(server)
        texts = [f"stream {n}: " + "abc" * (10 + n % 7) for n in range(256)]
        os.kill(engine, signal.SIGSTOP)  # so that all are there before the first one starts
        asked = [asyncio.ensure_future(client.ask(text)) for text in texts]

        async def all_there() -> bool:
            return await client.metric("request_received_total") == 256

        await eventually(all_there)
        os.kill(engine, signal.SIGCONT)
        replies = await asyncio.gather(*asked)
        assert max(event["details"]["batch_size"] for r in replies for event in r.events) == 256
        twins = await asyncio.gather(*(client.ask(text, stream=False) for text in texts))
        assert [r.text for r in replies] == [twin.text for twin in twins] == texts
        await client.check_all_free(4096 * 16)

    async def test_1000_clients_leave_at_random_moments(self, serve_process: Serve) -> None:
        sizes = ("--set", "echo.num_blocks=200", "--set", "echo.block_size=8")
        server = serve_process(
            "echo", *sizes, "--set", "max_batch_size=32", "--set", "max_waiting=2000"
        )
        client = Client(server.url)
        rng, moments = random.Random(5), Counter[str]()
        finished: list[tuple[str, str]] = []
        places = asyncio.Semaphore(300)

        async def visit(number: int, leaves: bool) -> None:
            text = "shared beginning " * rng.randint(0, 4) + f"{number:04}" * 8
            stream = rng.random() < 0.6
            if not leaves:
                finished.append((text, (await client.ask(text, stream=stream)).text))
                return
            path, body = client.route(stream), body_of(text, 512)
            async with client.opened("POST", path, body) as (reader, writer):
                if stream and rng.random() < 0.5:
                    events, at_most = 0, rng.randrange(1, len(text))
                    await read_head(reader)
                    async for _ in read_events(reader):
                        events += 1
                        if events == at_most:
                            break
                    moments["while it streamed"] += 1
                else:
                    await writer.drain()
                    await asyncio.sleep(rng.random() * 0.2)
                    moments["unread, stream" if stream else "unread, no stream"] += 1

        async def visitor(number: int) -> None:
            async with places:
                await visit(number, leaves=number % 5 > 0)

        await asyncio.gather(*(visitor(number) for number in range(1250)))
        assert sum(moments.values()) == 1000 and min(moments.values()) > 100, moments
        await client.check_all_free(200 * 8)
        twins = await asyncio.gather(*(client.ask(t, stream=False) for t, _ in finished))
        assert [output for _, output in finished] == [twin.text for twin in twins]
        assert [text for text, _ in finished] == [twin.text for twin in twins]
        assert await client.metric("npu_prefix_cache_hit_rate") > 0
        await client.check_all_free(200 * 8)
        assert server.stop() == 0 and "Traceback" not in server.text

    @pytest.mark.model
    async def test_64_streams_of_the_demo_model(self, serve_process: Serve) -> None:
        """Sampled, each with its own seed; the twins run in smaller batches, last ones first."""
        server = serve_process("smollm2-135m", "--set", "max_batched_tokens=2048")
        client, engine = Client(server.url, "smollm2-135m"), engine_of(server)
        prompts = [f"Story number {n}: once upon a time, {n % 9} friends" for n in range(64)]

        async def tell(n: int, stream: bool) -> str:
            more = {"do_sample": True, "temperature": 0.9, "seed": n + 1}
            return (await client.ask(prompts[n], stream=stream, new=10, **more)).text

        os.kill(engine, signal.SIGSTOP)
        asked = [asyncio.ensure_future(tell(n, True)) for n in range(64)]

        async def all_there() -> bool:
            return await client.metric("request_received_total") == 64

        await eventually(all_there)
        os.kill(engine, signal.SIGCONT)
        streamed = await asyncio.gather(*asked)
        twins: dict[int, str] = {}
        for start in range(48, -1, -16):
            numbers = range(start, start + 16)
            found = await asyncio.gather(*(tell(n, False) for n in numbers))
            twins.update(zip(numbers, found, strict=True))
        assert streamed == [twins[n] for n in range(64)]
        assert len(set(streamed)) > 32
        await client.check_all_free(1024 * 16)
