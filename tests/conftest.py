"""What all tests share: coroutine tests, the demo model, a server in its own process."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings

from mindstream.plugin.paths import models_dir

pytest_plugins = ["mindstream.plugin.testing"]

DEMO = "smollm2-135m"

# A busy machine is not a failure.
settings.register_profile("mindstream", deadline=None)
settings.load_profile("mindstream")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def test_...` on a fresh event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of the demo model is skipped with its cure where the model was never pulled."""
    if item.get_closest_marker("model") and not (models_dir() / DEMO).is_dir():
        pytest.skip(f"needs the demo model: mindstream pull {DEMO}")


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The weight directory of the demo model."""
    return models_dir() / DEMO


@dataclass
class ServerProcess:
    """`mindstream serve ...` on a free port."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)  # both streams, as they came

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signals it and gives the exit status."""
        self.process.send_signal(number)
        return self.process.wait(60)


def _start(arguments: tuple[str, ...], env: dict[str, str]) -> ServerProcess:
    process = subprocess.Popen(
        [sys.executable, "-m", "mindstream.plugin.cli", "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
    server = ServerProcess(process)
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                server.lines.append(line)
                found = re.search(r"is ready on (http://\S+)", line)
                if found:
                    server.url = found[1]
                    ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    assert ready.wait(180) and server.url, server.text
    return server


@pytest.fixture
def serve_process() -> Iterator[Callable[..., ServerProcess]]:
    """`serve_process("echo", "--set", "max_batch_size=1")` returns when ready."""
    started: list[ServerProcess] = []

    def start(*arguments: str, **env: str) -> ServerProcess:
        started.append(_start(arguments, env))
        return started[-1]

    yield start
    for server in started:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait(30)
