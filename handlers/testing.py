"""A real server over a scripted backend, for tests of anything that talks HTTP.

Its event loop runs in a thread, so that any client, blocking ones too, can talk to the socket. A
conftest imports the fixtures `loop_thread`, `start_server` and `server`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pytest
from tornado.httpserver import HTTPServer

from mindstream.plugin.app import make_app, make_server
from mindstream.plugin.backend import Limits
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.service import ModelService
from mindstream.plugin.testing import ScriptedBackend, scripted_service

T = TypeVar("T")


class LoopThread:
    """An event loop that tests run coroutines on from outside."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=60)

    def call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return self.run(call())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass
class Reply:
    """A whole HTTP reply; `body` without the transfer coding."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, each checked to be framed as documented."""
        blocks = self.body.split(b"\n\n")
        assert blocks.pop() == b""
        assert all(block.startswith(b"data:{") for block in blocks)
        return [json.loads(block.removeprefix(b"data:")) for block in blocks]


class Server:
    """One application over a scripted model called `echo`, and one called `other` if given.

    `start`: whether the models are loaded; `serving`: fields of the `serving:` block of `echo`.
    """

    def __init__(
        self,
        thread: LoopThread,
        backend: ScriptedBackend,
        *,
        other: ScriptedBackend | None = None,
        start: bool = True,
        **serving: Any,
    ) -> None:
        self.thread = thread
        self.backend = backend
        self.other = other
        self.service = thread.call(lambda: _service(backend, **serving))
        services = [self.service]
        if other is not None:
            services.append(thread.call(lambda: _service(other, name="other")))
        for service in services if start else ():
            thread.run(service.start())
        self._server = thread.call(lambda: self._listen(services))

    def _listen(self, services: list[ModelService]) -> HTTPServer:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        self.port: int = listener.getsockname()[1]
        server = make_server(make_app(services))
        server.add_sockets([listener])
        return server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        async def close() -> None:
            self._server.stop()
            await self._server.close_all_connections()

        self.thread.run(close())

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(20)
        return connection

    def exchange(self, raw: bytes) -> Reply:
        """One request, byte for byte, and its reply."""
        with self.connect() as connection:
            connection.sendall(raw)
            return read_reply(connection)

    def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Reply:
        """`body`: bytes as they are, anything else as JSON."""
        return self.exchange(request_bytes(method, path, body, headers))

    def generate(self, body: Any, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send("POST", "/v2/models/echo/generate", body, named)

    def stream(self, body: Any, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.send("POST", "/v2/models/echo/generate_stream", body, named)


def _service(backend: ScriptedBackend, **serving: Any) -> ModelService:
    echo = load_deployment("echo")
    return scripted_service(backend, replace(echo, serving=replace(echo.serving, **serving)))


def request_bytes(
    method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: test", "Connection: close"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    if data or method == "POST":
        lines.append(f"Content-Length: {len(data)}")
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_reply(connection: socket.socket) -> Reply:
    """Reads until the reply is complete, holding its framing against the standard."""
    with connection.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        headers = {}
        while (line := stream.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("transfer-encoding") == "chunked":
            return Reply(status, headers, b"".join(read_chunks(stream)))
        return Reply(status, headers, stream.read(int(headers.get("content-length", 0))))


def read_chunks(stream: Any) -> Iterator[bytes]:
    """The chunks of a chunked body, each as it was written."""
    while size := int(stream.readline(), 16):
        yield stream.read(size)
        assert stream.read(2) == b"\r\n"
    assert stream.readline() == b"\r\n"


def eventually(holds: Callable[[], bool]) -> None:
    """Waits for what the other thread is about to do."""
    until = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < until, "it never came to hold"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def loop_thread() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def start_server(loop_thread: LoopThread) -> Iterator[Callable[..., Server]]:
    """Starts a server with fields of `serving:` set; `limits` replaces the model's."""
    servers: list[Server] = []

    def start(limits: Limits | None = None, **serving: Any) -> Server:
        servers.append(Server(loop_thread, ScriptedBackend(limits), **serving))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(start_server: Callable[..., Server]) -> Server:
    return start_server()
