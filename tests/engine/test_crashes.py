"""Real processes killed, frozen or crashing: requests get an answer, the engine comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from mindstream.backends.engine import EngineBackend
from mindstream.backends.engine.restarts import Patience
from mindstream.backends.engine.testing import EXITS, is_alive, reference_tokens
from mindstream.plugin.backend import State
from mindstream.plugin.defaults import resolve_defaults
from mindstream.plugin.errors import BackendFailed, GenerationTimeout, Overloaded
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.service import ModelService
from mindstream.plugin.testing import started
from mindstream.plugin.tokenizer import BytesTokenizer

Make = Callable[..., Deployment]
HASH_MODEL = "mindstream.backends.engine.testing:HashModel"
QUICK = Patience(first_pause=0.02)


def running(
    deployment: Deployment, patience: Patience = QUICK
) -> AbstractAsyncContextManager[EngineBackend]:
    return started(EngineBackend(deployment, HASH_MODEL, patience))


def request(*prompt: int, new: int = 5) -> GenerationRequest:
    return GenerationRequest("r", prompt, new)


async def answer(backend: EngineBackend, wanted: GenerationRequest) -> list[int]:
    async with backend.submit(wanted) as chunks:
        return [token async for chunk in chunks for token in chunk.token_ids]


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        await asyncio.sleep(0.01)


def pid_of(backend: EngineBackend) -> int:
    pid = backend.engine_pid
    assert pid is not None
    return pid


def test_a_killed_engine_ends_its_streams_within_a_second_and_comes_back(either_loop: Make) -> None:
    async def main() -> None:
        async with running(either_loop(step_ms=5)) as backend:
            streams = [
                asyncio.ensure_future(answer(backend, request(n, new=200))) for n in range(2, 8)
            ]
            await eventually(lambda: backend.status().running == 6)
            done_before = backend.status().generated_tokens
            killed = time.monotonic()
            os.kill(pid_of(backend), signal.SIGKILL)
            outcomes = await asyncio.gather(*streams, return_exceptions=True)
            assert time.monotonic() - killed < 1.0
            assert all(isinstance(outcome, BackendFailed) for outcome in outcomes)
            assert backend.status().state is State.RESTARTING
            with pytest.raises(Overloaded, match="restarted"):
                backend.submit(request(2))
            await eventually(lambda: backend.status().state is State.READY)
            assert await answer(backend, request(2)) == reference_tokens(request(2))
            status = backend.status()
            assert status.generated_tokens >= done_before + 5
            assert status.free_blocks == status.total_blocks == 64

    asyncio.run(main())


def test_after_repeated_crashes_it_stays_down_and_says_why(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment(serving={"engine_restarts": 2})) as backend:
            for _ in range(2):
                await eventually(lambda: backend.status().state is State.READY)
                with pytest.raises(BackendFailed):
                    await answer(backend, request(2, EXITS))
            await eventually(lambda: backend.status().state is State.FAILED)
            reason = backend.status().reason
            assert "exited with status 7" in reason
            assert "serving.engine_restarts 2" in reason
            with pytest.raises(BackendFailed, match="exited with status 7"):
                backend.submit(request(2))
            assert not is_alive(pid_of(backend))

    asyncio.run(main())


def test_an_engine_that_does_not_load_again_stays_down_and_says_why(deployment: Make) -> None:
    """Although each attempt takes longer than a crash is remembered."""

    async def main() -> None:
        made = deployment(serving={"engine_restarts": 3})
        async with running(made, Patience(first_pause=0.02, crash_window=0.01)) as backend:
            made.mindformers["hash_model"]["exit_while_loading"] = True
            os.kill(pid_of(backend), signal.SIGKILL)
            await eventually(lambda: backend.status().state is State.FAILED)
            reason = backend.status().reason
            assert "exited with status 3: no device here" in reason
            assert "crash 3" in reason and "serving.engine_restarts 3" in reason
            with pytest.raises(BackendFailed, match="no device here"):
                backend.submit(request(2))

    asyncio.run(main())


def test_crashes_far_apart_never_keep_it_down(deployment: Make) -> None:
    async def main() -> None:
        made = deployment(serving={"engine_restarts": 2})
        async with running(made, Patience(first_pause=0.02, crash_window=0.05)) as backend:
            for _ in range(4):
                await asyncio.sleep(0.1)
                assert await answer(backend, request(2)) == reference_tokens(request(2))
                os.kill(pid_of(backend), signal.SIGKILL)
                await eventually(lambda: backend.status().state is not State.READY)
                await eventually(lambda: backend.status().state is not State.RESTARTING)
                assert backend.status().state is State.READY, backend.status().reason

    asyncio.run(main())


def test_stopping_while_the_engine_restarts(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment(), Patience(first_pause=30.0)) as backend:
            os.kill(pid_of(backend), signal.SIGKILL)
            await eventually(lambda: backend.status().state is State.RESTARTING)
        assert backend.status().state is State.STOPPED

    asyncio.run(main())


def test_signals_meant_for_the_server_do_not_end_the_engine(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment()) as backend:
            pid = pid_of(backend)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(pid, number)
            assert await answer(backend, request(2)) == reference_tokens(request(2))
            assert pid_of(backend) == pid

    asyncio.run(main())


def test_a_stopped_backend_leaves_no_process_even_a_frozen_one(either_loop: Make) -> None:
    async def main() -> int:
        async with running(either_loop(), Patience(shutdown=0.1)) as backend:
            os.kill(pid_of(backend), signal.SIGSTOP)
            return pid_of(backend)

    assert not is_alive(asyncio.run(main()))


def test_while_the_engine_is_frozen_time_limits_hold_and_nothing_is_lost(deployment: Make) -> None:
    async def main() -> None:
        plain = deployment(step_ms=2)
        async with running(plain) as backend:
            service = ModelService(plain, BytesTokenizer(), backend, resolve_defaults(plain, "ms"))

            async def timed_out(wanted: GenerationRequest) -> None:
                with pytest.raises(GenerationTimeout):
                    async with service.stream(wanted, timeout=0.2, restart_at_token=True) as chunks:
                        async for _ in chunks:
                            pass

            survivor = asyncio.ensure_future(answer(backend, request(9, new=100)))
            await eventually(lambda: backend.status().running == 1)
            os.kill(pid_of(backend), signal.SIGSTOP)
            wanted = [GenerationRequest(str(n), (n,), 100) for n in range(2, 8)]
            frozen = time.monotonic()
            await asyncio.gather(*(timed_out(one) for one in wanted))
            assert time.monotonic() - frozen < 2.0
            os.kill(pid_of(backend), signal.SIGCONT)
            assert await survivor == reference_tokens(request(9, new=100))
            await eventually(lambda: backend.status().free_blocks == 64)

    asyncio.run(main())


def test_a_silent_engine_is_unhealthy_and_a_hung_one_is_replaced(deployment: Make) -> None:
    async def main() -> None:
        patience = Patience(ping=0.05, silent=0.3, hung=1.0, first_pause=0.02)
        async with running(deployment(), patience) as backend:
            pid = pid_of(backend)
            os.kill(pid, signal.SIGSTOP)
            await eventually(lambda: "silent" in backend.status().reason)
            assert backend.status().state is State.RESTARTING
            await eventually(lambda: pid_of(backend) != pid)
            await eventually(lambda: backend.status().state is State.READY)
            assert not is_alive(pid)
            assert await answer(backend, request(2)) == reference_tokens(request(2))

    asyncio.run(main())


SERVER = """
import asyncio, sys
from pathlib import Path
from mindstream.backends.engine import EngineBackend
from mindstream.plugin.model_config import Deployment, ServingConfig

async def main():
    deployment = Deployment(Path("t.yaml"), ServingConfig(), {"hash_model": {"step_ms": 20}}, None)
    backend = EngineBackend(deployment, "mindstream.backends.engine.testing:HashModel")
    await backend.start()
    print(backend.engine_pid, flush=True)
    await asyncio.sleep(60 if sys.argv[1] == "stay" else 0)

asyncio.run(main())
"""


@pytest.mark.parametrize("frozen", [False, True], ids=["", "with a frozen engine"])
def test_a_killed_server_takes_its_engine_with_it(frozen: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVER, "stay"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert is_alive(pid)
        if frozen:
            os.kill(pid, signal.SIGSTOP)
        server.kill()
        server.wait()
    asyncio.run(eventually(lambda: not is_alive(pid)))


def test_a_server_that_just_exits_takes_its_engine_with_it() -> None:
    server = subprocess.run(
        [sys.executable, "-c", SERVER, "leave"], capture_output=True, check=True
    )
    asyncio.run(eventually(lambda: not is_alive(int(server.stdout))))
