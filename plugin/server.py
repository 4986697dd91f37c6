"""Runs one deployment as an HTTP server until SIGTERM or SIGINT. Called by the command line.

Order: take the port, fetch missing demo weights, load the model, listen, say so; at a signal stop
accepting, let running requests end, leave. A second signal ends them at once.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from tornado.httpserver import HTTPServer
from tornado.web import Application

from mindstream.plugin.app import is_writing, make_app, make_server
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.service import ModelService, open_service

Say = Callable[[str], None]

_PROGRESS_EVERY = 10.0  # seconds between signs of life while a model loads
# Handlers write the last event of a drained stream after the backend is done with it.
_LAST_WRITES = 0.2
_LOOK_EVERY = 0.02  # seconds between looks at clients that read slowly


def serve(deployment: Deployment, host: str, port: int, *, say: Say, ready: Say) -> None:
    """Blocks until a signal ended it. Raises ConfigError when it cannot start."""
    sockets = bind(host, port)
    try:
        pull_if_missing(deployment, say)
        asyncio.run(_run(deployment, sockets, say, ready))
    finally:
        for sock in sockets:
            sock.close()


def bind(host: str, port: int) -> list[socket.socket]:
    """Takes host:port without listening yet, so that nobody is left hanging while a model loads."""
    try:
        found = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: no such address: {error.strerror}.") from None
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        if port == 0 and sockets:
            break  # the system chose a port for the first address; one is enough
        sock = socket.socket(family, kind, protocol)
        sockets.append(sock)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.setblocking(False)
        except OSError as error:
            for opened in sockets:
                opened.close()
            raise _cannot_listen(str(address[0]), port, error) from None
    return sockets


def pull_if_missing(deployment: Deployment, say: Say) -> None:
    """Fetches the weights that `serving.pull` names, if the deployment's directory is missing."""
    name = deployment.serving.pull
    if not name or (deployment.model_dir is not None and deployment.model_dir.is_dir()):
        return
    from mindstream.plugin.pull import pull

    say(f"weights of {name} are missing; fetching them once")
    pull(name, say)


async def _run(deployment: Deployment, sockets: list[socket.socket], say: Say, ready: Say) -> None:
    signals = _Signals()
    service = open_service(deployment)
    began = time.monotonic()
    say(f"loading {deployment.name} (backend {deployment.serving.backend})")
    try:
        if not await signals.first(_with_progress(service.start(), deployment.name, say)):
            say("stopped before it was ready")
            return
        app = make_app([service])
        server = _listen(app, sockets)
        ready(_ready_text(service, sockets, time.monotonic() - began))
        await signals.wait()
        server.stop()
        say("stopping: no new requests, running ones may end (a second signal ends them now)")
        until = time.monotonic() + deployment.serving.drain_timeout
        drained = await signals.first(service.stop(drain=True))
    finally:
        await service.stop(drain=False)
    await asyncio.sleep(_LAST_WRITES)
    if drained:
        await signals.first(_written(app, until))
    await server.close_all_connections()
    say("stopped")


async def _written(app: Application, until: float) -> None:
    """Lets clients take what was written to them, `until` then (monotonic) at most."""
    while is_writing(app) and time.monotonic() < until:  # noqa: ASYNC110 - sockets send no event
        await asyncio.sleep(_LOOK_EVERY)


class _Signals:
    """SIGTERM and SIGINT as an event that can be waited for more than once."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived.set)

    async def wait(self) -> None:
        """Returns at the next signal."""
        await self._arrived.wait()
        self._arrived.clear()

    async def first(self, work: Awaitable[None]) -> bool:
        """Runs `work`; False if a signal came first, which cancels it."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
                return True
            return False
        finally:
            for each in (task, stop):
                each.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _with_progress(work: Awaitable[None], name: str, say: Say) -> None:
    began = time.monotonic()
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=_PROGRESS_EVERY))[0]:
            say(f"still loading {name} ({time.monotonic() - began:.0f} s)")
        task.result()
    finally:
        task.cancel()


def _listen(app: Application, sockets: list[socket.socket]) -> HTTPServer:
    server = make_server(app)
    for sock in sockets:
        try:
            sock.listen(1024)
        except OSError as error:
            address = sock.getsockname()
            raise _cannot_listen(address[0], address[1], error) from None
    server.add_sockets(sockets)
    return server


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    name = errno.errorcode.get(error.errno or 0, "unknown")
    why = os.strerror(error.errno) if error.errno else str(error)
    return ConfigError(
        f"Cannot listen on {host}:{port}: {why} (errno {error.errno}, {name}); "
        "choose another --host or --port, or stop what uses it."
    )


def _ready_text(service: ModelService, sockets: list[socket.socket], took: float) -> str:
    host, port = sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{port}"
    return (
        f"{service.name} is ready on {url} after {took:.1f} s. Try:\n"
        f"  curl -N {url}/v2/models/{service.name}/generate_stream "
        """-d '{"text_input": "Gravity is", "parameters": {"max_new_tokens": 32}}'"""
    )
