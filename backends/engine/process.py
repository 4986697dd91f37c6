"""The engine process: started by `supervisor.py` with one inherited socket, it runs an `Engine`.

It ends when told to, when the link closes, and, by the kernel's hand, when the server process dies.
Signals that a terminal or a service manager sends to the whole group are the server's business.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import pickle
import signal
import socket
import sys
from dataclasses import dataclass, replace

from mindstream.backends.engine.link import EngineEnd
from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.messages import Command, Log, Ping, Ready, Refused, Shutdown
from mindstream.backends.engine.overlap import make_engine, make_model
from mindstream.backends.engine.sampler import Sampler
from mindstream.backends.engine.step_model import StepModel
from mindstream.plugin.backend import Limits
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.serving_config import ServingConfig
from mindstream.plugin.watermark import load_key

_PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """What the process is to run; the first frame, pickled (both ends are this package)."""

    deployment: Deployment
    step_model: str  # "module:attribute", a StepModelFactory
    import_path: tuple[str, ...]  # the server's sys.path
    log_level: int


def main(descriptor: int, parent: int) -> None:
    """Runs until the end; `descriptor` is the socket, `parent` the server's process id."""
    _die_with(parent)
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)  # a grandchild must not keep the link open
    link = EngineEnd(sock)
    try:
        start: Start = pickle.loads(link.receive_blob())
        sys.path += [entry for entry in start.import_path if entry not in sys.path]
        handlers = [_LinkHandler(link)]
        logging.basicConfig(level=start.log_level, handlers=handlers, force=True)
        _run(start, link)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the server is gone: there is nobody to tell


def _die_with(parent: int) -> None:
    """The kernel kills this process when the server dies, SIGKILL included (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before that call
        raise SystemExit(0)


def _run(start: Start, link: EngineEnd) -> None:
    serving = start.deployment.serving
    try:
        model = make_model(lambda: _make_model(start), serving)
        limits = _usable(model.load(), serving)
        key = load_key(start.deployment)
    except ConfigError as error:
        link.send(Refused(str(error)))
        return
    engine = make_engine(model, limits, serving, Sampler(key))
    # What loading left behind stays for good: the collector need not look at it in the middle of a
    # step.
    gc.collect()
    gc.freeze()
    try:
        link.send(Ready(limits, engine.scheduler.stats()))
        _serve(engine, link)
    finally:
        model.close()


def _make_model(start: Start) -> StepModel:
    module, _, attribute = start.step_model.partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    model: StepModel = factory(start.deployment)
    return model


def _usable(limits: Limits, serving: ServingConfig) -> Limits:
    """What the model allows and the engine can use of it."""
    room = limits.num_blocks * limits.block_size
    if room < 1:
        raise ConfigError(
            f"The KV cache has {limits.num_blocks} blocks of {limits.block_size} tokens; "
            "it needs at least one of each."
        )
    if limits.max_seq_len > room:
        log.warning(
            "max_seq_len %d is cut to %d, all that the KV cache can hold (%d blocks of %d tokens)",
            limits.max_seq_len,
            room,
            limits.num_blocks,
            limits.block_size,
        )
    slots = min(limits.max_batch_size, serving.max_batch_size, serving.max_batched_tokens)
    return replace(limits, max_seq_len=min(limits.max_seq_len, room), max_batch_size=slots)


def _serve(engine: Engine, link: EngineEnd) -> None:
    """Receive, step, report; sleeps while there is nothing to do."""
    stopping = False

    def receive(*, wait: bool = False) -> None:
        nonlocal stopping
        for command in link.receive(wait=wait):
            stopping = _apply(engine, command) or stopping

    while not stopping:
        receive(wait=engine.idle)
        engine.step(receive)
        link.send(engine.report())


def _apply(engine: Engine, command: Command) -> bool:
    """True if the command is to shut down."""
    if isinstance(command, Shutdown):
        return True
    if not isinstance(command, Ping):  # any report answers it
        engine.apply(command)
    return False


class _LinkHandler(logging.Handler):
    """Sends log records to the server, which decides where they go and what stands before them."""

    # Its own: libraries give the handlers they find a format with a prefix.
    _bare = logging.Formatter("%(message)s")

    def __init__(self, link: EngineEnd) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """Called by `logging`, from any thread."""
        try:
            self._link.send(Log(record.levelno, record.name, self._bare.format(record)))
        except OSError:
            self.handleError(record)
