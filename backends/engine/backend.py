"""`EngineBackend`: the upper seam over an engine in a process of its own. On the event loop.

If the engine process ends unasked, every open request ends at once with BackendFailed, and it is
started again after a pause that doubles with every crash of the last ten minutes of service; after
`serving.engine_restarts` of them it stays down.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import sys
import time
from collections.abc import Coroutine

from mindstream.backends.engine.messages import (
    Cancel,
    Log,
    Notice,
    Ping,
    Ready,
    Refused,
    Report,
    Stop,
    Submit,
)
from mindstream.backends.engine.process import Start
from mindstream.backends.engine.restarts import CrashRecord, Patience
from mindstream.backends.engine.scheduler import overloaded
from mindstream.backends.engine.stats import Pace, Totals
from mindstream.backends.engine.stream import EngineStream, error_of
from mindstream.backends.engine.supervisor import EngineProcess
from mindstream.plugin.backend import BackendStatus, Limits, State
from mindstream.plugin.errors import (
    BackendFailed,
    ConfigError,
    Overloaded,
    RequestError,
    ServiceStopped,
)
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import GenerationRequest

log = logging.getLogger("mindstream.engine")


class EngineBackend:
    """A `Backend` for any StepModel, given as "module:attribute" of its factory.

    The factory and everything it imports are loaded in the engine process only.
    """

    def __init__(
        self, deployment: Deployment, step_model: str, patience: Patience | None = None
    ) -> None:
        self._deployment = deployment
        self._serving = deployment.serving
        self._step_model = step_model
        self._patience = patience or Patience()
        self._state = State.STARTING
        self._reason = ""
        self._limits: Limits | None = None
        self._process: EngineProcess | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._streams: dict[int, EngineStream] = {}
        self._no_streams = asyncio.Event()
        self._keys = itertools.count(1)
        self._totals = Totals()
        self._pace = Pace()
        self._crashes = CrashRecord(self._patience, self._serving.engine_restarts)
        self._ready_since = self._heard = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._ending = asyncio.Lock()

    @property
    def limits(self) -> Limits:
        """Valid after `start()`."""
        if self._limits is None:
            raise RuntimeError("EngineBackend.limits is known only after start()")
        return self._limits

    @property
    def engine_pid(self) -> int | None:
        """Process id of the running engine, for operators and tests."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Raises ConfigError with the StepModel's own sentence, or with how the process ended."""
        try:
            await self._launch()
        except (_EngineDied, ConfigError) as error:
            self._state, self._reason = State.FAILED, str(error)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self._deployment.path}: {error} while it started.") from None
        self._spawn(self._keep_watch(), "engine watch")

    async def _launch(self) -> None:
        """One attempt to get a loaded engine. Raises ConfigError or _EngineDied."""
        process = EngineProcess(self)
        self._process = process
        self._ready = asyncio.get_running_loop().create_future()
        try:
            await process.launch(self._start_message())
            ready = await self._ready
        except _Lost:
            raise _EngineDied(await process.autopsy()) from None
        except BaseException:
            await process.end(0)
            raise
        finally:
            self._ready = None
        self._limits, self._totals.current = ready.limits, ready.stats
        self._ready_since = self._heard = time.monotonic()
        self._state, self._reason = State.READY, ""

    def _start_message(self) -> Start:
        level = logging.getLogger("mindstream").getEffectiveLevel()
        return Start(self._deployment, self._step_model, tuple(sys.path), level)

    def submit(self, request: GenerationRequest) -> EngineStream:
        """See `Backend.submit`. While the engine restarts the answer is Overloaded: come back."""
        process = self._process
        if self._closing:
            raise ServiceStopped("The service has been stopped.")
        if self._state is State.RESTARTING:
            pause = math.ceil(self._crashes.pause) + 1
            raise Overloaded("The engine is being restarted; come back later.", pause)
        if self._state is not State.READY or process is None:
            raise BackendFailed(f"The engine is not running: {self._reason or self._state.value}.")
        if len(self._streams) >= self._totals.current.capacity:
            waiting = len(self._streams) - self._totals.current.running
            raise overloaded(waiting, self._serving.max_waiting, self._pace.retry_after)
        if not self._streams:
            self._pace.busy()
        stream = EngineStream(next(self._keys), self)
        self._streams[stream.key] = stream
        self._no_streams.clear()
        process.send(Submit(stream.key, request, time.monotonic()))
        return stream

    def cancel(self, key: int) -> None:
        """A stream's reader left."""
        if self._forget(key) is not None and self._process is not None:
            self._process.send(Cancel(key))

    def stop_early(self, key: int) -> None:
        """A stream is to end with FinishReason.STOP."""
        if key in self._streams and self._process is not None:
            self._process.send(Stop(key))

    def _forget(self, key: int) -> EngineStream | None:
        stream = self._streams.pop(key, None)
        if stream is not None:
            self._pace.ended()
        if not self._streams:
            self._no_streams.set()
        return stream

    def status(self) -> BackendStatus:
        """See `Backend.status`."""
        state, reason = self._state, self._reason
        if state is State.READY:
            silence = time.monotonic() - self._heard
            if self._closing:
                state, reason = State.STOPPED, "draining"
            elif silence > self._patience.silent:
                state, reason = State.RESTARTING, f"the engine has been silent for {silence:.0f} s"
            elif len(self._streams) >= self._totals.current.capacity:
                state, reason = State.BUSY, "the waiting queue is full"
        return self._totals.status(state, reason, self._limits)

    # What the engine process says

    def on_notice(self, process: EngineProcess, notice: Notice) -> None:
        """Called by the link for each message."""
        if process is not self._process:
            return
        self._heard = time.monotonic()
        if isinstance(notice, Report):
            self._take(notice)
        elif isinstance(notice, Log):
            logging.getLogger(notice.name).log(notice.level, "%s", notice.text)
        elif self._ready is not None and not self._ready.done():
            if isinstance(notice, Refused):
                self._ready.set_exception(ConfigError(notice.message))
            else:
                self._ready.set_result(notice)

    def _take(self, report: Report) -> None:
        self._totals.current = report.stats
        streams, size = self._streams, report.batch_size
        for delta in report.deltas:
            stream = streams.get(delta.key)
            if stream is None:
                continue
            stream.push(delta, size)
            if delta.finish:
                self._forget(delta.key)
        for failure in report.failures:
            stream = self._forget(failure.key)
            if stream is not None:
                stream.fail(error_of(failure))

    def on_lost(self, process: EngineProcess) -> None:
        """Called by the link when the engine has gone, for whatever reason."""
        if process is not self._process:
            return
        if self._ready is not None:
            if not self._ready.done():
                self._ready.set_exception(_Lost())
            return
        if self._closing:
            self._fail_streams(ServiceStopped("The service has been stopped."))
            return
        self._state, self._reason = State.RESTARTING, "the engine process ended"
        self._totals.restart()
        self._fail_streams(BackendFailed("The engine broke while the request was in it."))
        self._spawn(self._revive(process), "engine restart")

    def _fail_streams(self, error: RequestError) -> None:
        for key in list(self._streams):
            stream = self._forget(key)
            if stream is not None:
                stream.fail(error)

    # Its life

    async def _revive(self, process: EngineProcess) -> None:
        """Restarts the engine until it runs or has crashed too often."""
        served = self._heard - self._ready_since  # to its last sign of life: it may have hung
        reason = await process.autopsy()
        while not self._closing:
            self._crashes.add(served)
            log.error("%s (%s)", reason, self._crashes)
            if self._crashes.too_many:
                self._state, self._reason = State.FAILED, f"{reason}; {self._crashes}"
                log.error("the engine stays down")
                return
            self._reason = reason
            await asyncio.sleep(self._crashes.pause)
            try:
                await self._launch()
            except (_EngineDied, ConfigError) as error:
                reason, served = str(error), 0.0
            else:
                log.info("the engine is back")
                return

    async def _keep_watch(self) -> None:
        """Pings the engine, and kills one that has long stopped to answer."""
        while True:
            asleep = time.monotonic()
            await asyncio.sleep(self._patience.ping)
            if time.monotonic() - asleep > 2 * self._patience.ping:
                self._heard = time.monotonic()  # this process was frozen and could not hear
            process = self._process
            if process is None or self._state is not State.READY:
                continue
            if time.monotonic() - self._heard > self._patience.hung:
                log.error("the engine has not answered for %.0f s: killed", self._patience.hung)
                process.kill()
            else:
                process.send(Ping())

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self, *, drain: bool) -> None:
        """See `Backend.stop`. The caller bounds the drain, by cancelling or by a second call."""
        self._closing = True
        if drain and self._streams:
            await self._no_streams.wait()
        self._fail_streams(ServiceStopped("The service has been stopped."))
        async with self._ending:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._process is not None:
                await self._process.end(self._patience.shutdown)
                self._process = None
            self._state, self._reason = State.STOPPED, ""


class _Lost(Exception):
    """The link to a starting engine was lost."""


class _EngineDied(Exception):
    """A starting engine ended; the message says how."""
