"""The guide's code runs as it stands, and its links lead somewhere."""

from __future__ import annotations

import asyncio
import importlib
import re
from pathlib import Path

import pytest

from mindstream.plugin.contract import check_contract
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.request import Chunk, GenerationRequest

GUIDE = Path(__file__).parents[1] / "docs" / "writing-a-backend.md"


def test_links() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE.read_text()):
        assert (GUIDE.parent / target).exists(), target


def test_the_step_model_of_the_guide_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, backend, _ = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (tmp_path / "parrot_model.py").write_text(model)
    (tmp_path / "parrot_backend.py").write_text(backend)
    yaml = tmp_path / "parrot.yaml"
    yaml.write_text(
        "serving: {tokenizer: bytes, max_batched_tokens: 8}\nparrot: {num_blocks: 32}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    parrot = importlib.import_module("parrot_backend").ParrotBackend
    deployment = load_deployment(yaml)
    # A prompt of several chunks and blocks: what comes back was read from the paged cache.
    prompt = tuple(b"abcdefghijklmnopqrstuvwxyz0123456789 abc")

    asyncio.run(check_contract(lambda: parrot(deployment), prompt))

    async def answer() -> list[Chunk]:
        running = parrot(deployment)
        await running.start()
        try:
            async with running.submit(GenerationRequest("a", prompt, 12)) as chunks:
                return [chunk async for chunk in chunks]
        finally:
            await running.stop(drain=False)

    assert bytes(i for chunk in asyncio.run(answer()) for i in chunk.token_ids) == b"defghijklmno"
