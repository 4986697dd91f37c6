"""The promise of the engine, kept by a real model: the same request gives the same text."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.request import FinishReason, GenerationRequest, SamplingParams
from mindstream.plugin.service import ModelService, open_service

pytestmark = pytest.mark.model

STREAMS, TOKENS = 64, 36


async def requests_for(service: ModelService) -> list[GenerationRequest]:
    rng = random.Random(5)
    words = ["cold", "island", "seven", "Berlin", "music", "tea", "run", "of"]
    requests = []
    for number in range(STREAMS):
        text = "A short story, told to children, begins like this. " * (number % 2)
        text += " ".join(rng.choices(words, k=rng.randint(1, 9)))
        sampling = SamplingParams(do_sample=number % 4 > 0, temperature=0.9, seed=number + 1)
        requests.append(
            GenerationRequest(
                str(number),
                await service.encode(text),
                TOKENS,
                sampling,
                priority=rng.randint(1, 5),
            )
        )
    return requests


async def text_of(service: ModelService, request: GenerationRequest) -> str:
    async with service.stream(request, timeout=100, restart_at_token=True) as chunks:
        got = [chunk async for chunk in chunks]
    assert got[-1].chunk.finish_reason is FinishReason.LENGTH
    return "".join(chunk.text for chunk in got)


@asynccontextmanager
async def running(overlap: str) -> AsyncIterator[ModelService]:
    """With a cache for about half of the streams, so that some are preempted."""
    overrides = {"kv_cache_gib": "0.05", "max_seq_len": "512", "overlap": overlap}
    service = open_service(load_deployment("smollm2-135m", overrides))
    await service.start()
    try:
        yield service
    finally:
        await service.stop(drain=False)


async def test_64_streams_give_what_each_gives_otherwise() -> None:
    """Together; backwards, a few a time, with prefixes in the cache; and by the other loop."""
    async with running("false") as service:
        requests = await requests_for(service)
        together = await asyncio.gather(*(text_of(service, request) for request in requests))
        status = service.status()
        assert status.preemptions > 0
        assert status.free_blocks == status.total_blocks

        few = asyncio.Semaphore(5)

        async def twin(request: GenerationRequest) -> str:
            async with few:
                return await text_of(service, request)

        apart = await asyncio.gather(*(twin(request) for request in reversed(requests)))
        assert apart[::-1] == together
        assert service.status().prefix_hit_tokens > 0
    async with running("true") as service:
        overlapping = await asyncio.gather(*(text_of(service, request) for request in requests))
        assert overlapping == together
        status = service.status()
        assert status.preemptions > 0
        assert status.free_blocks == status.total_blocks
