"""Starts `mindstream serve` for a measurement, waits until it is ready, watches its processes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_READY_SECONDS = 300.0
_STOP_SECONDS = 45.0


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; `pid` is its event-loop process, the engine is a child of it."""

    url: str
    model: str
    pid: int
    seconds: float = 0.0  # from its start until it was ready
    log: str = ""  # what it had said by then


@contextmanager
def serve(deployment: str, overrides: Sequence[str] = ()) -> Iterator[Server]:
    """Serves a shipped name or a yaml on a free port of loopback; ends it at the end of the block.

    `overrides` are KEY=VALUE of `mindstream serve --set`. Raises RuntimeError with the end of its
    log if it does not become ready.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The console script beside this interpreter: the environment that is measured.
    command = [str(Path(sys.executable).with_name("mindstream")), "serve", deployment]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += [argument for override in overrides for argument in ("--set", override)]
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_ready(process, port)
            seconds = time.monotonic() - began
            said = os.pread(log.fileno(), 1 << 20, 0).decode("utf-8", "replace")
            name = _model_name(port)
            yield Server(f"http://127.0.0.1:{port}", name, process.pid, seconds, said)
        except RuntimeError as error:
            log.seek(0)
            tail = log.read()[-2000:].decode("utf-8", "replace")
            raise RuntimeError(f"{' '.join(command)}: {error}\n{tail}") from None
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}")
        try:
            if _get(port, "/v2/health/ready")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"the server was not ready after {_READY_SECONDS:g} s")


def _model_name(port: int) -> str:
    return str(json.loads(_get(port, "/v1/models")[1])["data"][0]["id"])


def _get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def process_tree(pid: int) -> list[int]:
    """The process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:
                continue
    return found


def peak_bytes(pid: int) -> int:
    """Peak resident memory of the tree: each process' own peak, added. Shared pages count twice."""
    return sum(_status_kib(process, "VmHWM") for process in process_tree(pid)) * 1024


def resident_bytes(pid: int, *, tree: bool = True) -> int:
    """Resident memory now."""
    processes = process_tree(pid) if tree else [pid]
    return sum(_status_kib(process, "VmRSS") for process in processes) * 1024


def cpu_seconds(pid: int) -> float:
    """User and system time of one process, its threads included, its children not."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_kib(pid: int, key: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0  # ended meanwhile
    line = next((line for line in status.splitlines() if line.startswith(key + ":")), "0 0")
    return int(line.split()[1])
