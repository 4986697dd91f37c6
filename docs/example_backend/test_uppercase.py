"""How a backend is tested: the contract first, then what is its own."""

import asyncio
from pathlib import Path

from mindstream_uppercase import UppercaseBackend

from mindstream.plugin.contract import check_contract
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.request import FinishReason, GenerationRequest

DEPLOYMENT = load_deployment(str(Path(__file__).with_name("uppercase.yaml")))


def test_contract() -> None:
    asyncio.run(check_contract(lambda: UppercaseBackend(DEPLOYMENT), b"hello world"))


def test_answer() -> None:
    async def run() -> tuple[bytes, FinishReason | None]:
        backend = UppercaseBackend(DEPLOYMENT)
        await backend.start()
        request = GenerationRequest("a", tuple("größe!".encode()), max_new_tokens=7)
        async with backend.submit(request) as chunks:
            found = [chunk async for chunk in chunks]
        return bytes(i for chunk in found for i in chunk.token_ids), found[-1].finish_reason

    assert asyncio.run(run()) == ("GRößE".encode(), FinishReason.LENGTH)
