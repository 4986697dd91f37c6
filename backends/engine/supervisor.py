"""One life of the engine process, seen from the event loop: start, talk, find out why it ended."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import IO, Protocol

from mindstream.backends.engine.link import ServerEnd
from mindstream.backends.engine.messages import Command, Notice, Shutdown
from mindstream.backends.engine.process import Start

log = logging.getLogger("mindstream.engine")
output_log = logging.getLogger("mindstream.engine.output")

_CODE = "from mindstream.backends.engine.process import main; main({fd}, {parent})"
_TAIL_LINES = 20
_EXIT_GRACE = 1.0  # seconds an engine that hung up gets to finish its last words
_POLL = 0.01


class Watcher(Protocol):
    """Who wants to know: the backend."""

    def on_notice(self, process: EngineProcess, notice: Notice) -> None: ...

    def on_lost(self, process: EngineProcess) -> None: ...


class EngineProcess:
    """Made by `launch`. Everything happens on the event loop's thread: the kernel ties the life of
    the engine to the thread that starts it.
    """

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._link = ServerEnd(
            lambda notice: watcher.on_notice(self, notice), lambda: watcher.on_lost(self)
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._output_ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """Of the running process."""
        if self._process is None:
            raise RuntimeError("the engine process was never launched")
        return self._process.pid

    async def launch(self, start: Start) -> None:
        """Starts the process and hands it `start`; returns before the model is loaded."""
        loop = asyncio.get_running_loop()
        mine, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            code = _CODE.format(fd=descriptor, parent=os.getpid())
            self._process = subprocess.Popen(  # noqa: ASYNC220 - must be this thread; takes ~2 ms
                [sys.executable, "-c", code],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        await loop.create_unix_connection(lambda: self._link, sock=mine)
        await self._read_output(self._process.stdout)
        self._link.send_blob(pickle.dumps(start))

    async def _read_output(self, pipe: IO[bytes] | None) -> None:
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: _OutputLog(self._tail.append, self._output_ended.set), pipe
        )

    def send(self, command: Command) -> None:
        """Queues a command; without effect when the engine is gone."""
        self._link.send(command)

    def kill(self) -> None:
        """SIGKILL; `Watcher.on_lost` follows."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def end(self, grace: float) -> None:
        """Asks it to shut down, and kills it after `grace` seconds. It is gone afterwards."""
        self._link.send(Shutdown())
        try:
            await self._wait(grace)
        finally:
            self.kill()
            self._link.close()
        await self._wait(_EXIT_GRACE)

    async def _wait(self, seconds: float) -> bool:
        """Until it has ended, but not longer."""
        until = time.monotonic() + seconds
        while self._process is not None and self._process.poll() is None:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(_POLL)
        return True

    async def autopsy(self) -> str:
        """After `on_lost`: makes sure it is gone and says why, in one sentence."""
        if not await self._wait(_EXIT_GRACE):
            self.kill()
            await self._wait(_EXIT_GRACE)
        try:  # a grandchild may hold the pipe open
            await asyncio.wait_for(self._output_ended.wait(), _EXIT_GRACE)
        except (TimeoutError, asyncio.TimeoutError):
            log.debug("the engine's output is still open")
        code = None if self._process is None else self._process.poll()
        last = f": {self._tail[-1]}" if self._tail else ""
        return f"the engine process {_how_it_ended(code)}{last}"


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "does not end"
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"exited with status {code}"


class _OutputLog(asyncio.Protocol):
    """Logs what the engine process and its libraries print, line by line."""

    def __init__(self, on_line: Callable[[str], None], on_end: Callable[[], None]) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._log(self._rest)
        self._on_end()

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            output_log.info("%s", text)
            self._on_line(text)
