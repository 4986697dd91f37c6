"""Many streams over a real engine process: exact answers, and all memory back afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from mindstream.backends.echo import EchoBackend
from mindstream.plugin.model_config import Deployment, EchoConfig
from mindstream.plugin.request import FinishReason, GenerationRequest
from mindstream.plugin.testing import started

Make = Callable[..., Deployment]


def running(deployment: Deployment) -> AbstractAsyncContextManager[EchoBackend]:
    return started(EchoBackend(deployment))


async def take(backend: EchoBackend, text: bytes, *, at_most: int | None = None) -> bytes:
    """The whole answer; or the beginning of it, and away."""
    output = b""
    async with backend.submit(GenerationRequest("r", tuple(text), len(text) + 1)) as chunks:
        if at_most == 0:
            return output
        async for chunk in chunks:
            if chunk.finish_reason is FinishReason.EOS:
                return output
            output += bytes(chunk.token_ids)
            if len(output) == at_most:
                return output
    raise AssertionError("the stream ended without its end token")


async def check_all_free(backend: EchoBackend) -> None:
    until = time.monotonic() + 10
    while backend.status().free_blocks < backend.status().total_blocks:
        assert time.monotonic() < until, backend.status()
        await asyncio.sleep(0.01)
    assert (backend.status().running, backend.status().waiting) == (0, 0)


def test_256_concurrent_streams(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment(serving={"max_batch_size": 256})) as backend:
            texts = [f"{number}: ".encode() * (number % 30 + 1) for number in range(256)]
            assert await asyncio.gather(*(take(backend, text) for text in texts)) == texts
            await check_all_free(backend)

    asyncio.run(main())


def test_1000_random_disconnects(either_loop: Make) -> None:
    rng = random.Random(11)

    async def client(backend: EchoBackend, number: int, leave: bool) -> None:
        text = b"shared beginning " * rng.randint(0, 3) + str(number).encode() * 5
        at_most = rng.randrange(len(text)) if leave else None
        await asyncio.sleep(rng.random() * 0.5)
        output = await take(backend, text, at_most=at_most)
        assert output == text[:at_most]

    async def main() -> None:
        serving = {"max_waiting": 2000, "echo": EchoConfig(num_blocks=200, block_size=8)}
        async with running(either_loop(serving=serving)) as backend:
            clients = [client(backend, number, number % 5 > 0) for number in range(1250)]
            await asyncio.gather(*clients)
            await check_all_free(backend)
            assert backend.status().prefix_hit_tokens > 0

    asyncio.run(main())


def test_a_full_memory_makes_requests_wait_and_loses_none(deployment: Make) -> None:
    async def main() -> None:
        serving = {"echo": EchoConfig(num_blocks=30, block_size=8)}
        async with running(deployment(serving=serving)) as backend:
            texts = [bytes([65 + number]) * (60 + number) for number in range(40)]
            assert await asyncio.gather(*(take(backend, text) for text in texts)) == texts
            assert backend.status().preemptions > 0
            await check_all_free(backend)

    asyncio.run(main())
