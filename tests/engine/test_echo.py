"""The echo backend gives every prompt back, through a paged cache that must be kept well."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from mindstream.backends.echo import EchoBackend
from mindstream.backends.echo.step_model import EchoStepModel
from mindstream.backends.engine.loop import Engine
from mindstream.backends.engine.messages import Submit
from mindstream.backends.engine.sampler import Sampler
from mindstream.plugin.errors import ConfigError
from mindstream.plugin.model_config import Deployment, EchoConfig, load_deployment
from mindstream.plugin.request import FinishReason, GenerationRequest
from mindstream.plugin.service import open_service
from mindstream.plugin.testing import started

Make = Callable[..., Deployment]


def running(deployment: Deployment) -> AbstractAsyncContextManager[EchoBackend]:
    return started(EchoBackend(deployment))


async def echo_of(backend: EchoBackend, request: GenerationRequest) -> tuple[list[int], object]:
    async with backend.submit(request) as chunks:
        got = [chunk async for chunk in chunks]
    return [token for chunk in got for token in chunk.token_ids], got[-1].finish_reason


@pytest.mark.parametrize("text", ["a", "aaaa", "abab", "naïve 日本 🙂", "\x00\n" * 40])
def test_the_service_streams_the_prompt_back(text: str) -> None:
    async def main() -> str:
        service = open_service(load_deployment("echo"))
        await service.start()
        try:
            ids = await service.encode(text)
            request = GenerationRequest("r", ids, 500)
            async with service.stream(request, timeout=30, restart_at_token=True) as chunks:
                pieces = [chunk async for chunk in chunks]
        finally:
            await service.stop(drain=False)
        assert pieces[-1].chunk.finish_reason is FinishReason.EOS
        assert pieces[-1].chunk.generated_tokens == len(ids) + 1
        return "".join(piece.text for piece in pieces)

    assert asyncio.run(main()) == text


def test_a_limit_cuts_the_echo_and_a_continuation_finishes_it(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment()) as backend:
            first = GenerationRequest("r", tuple(b"hello"), 3)
            assert await echo_of(backend, first) == (list(b"hel"), FinishReason.LENGTH)
            rest = GenerationRequest("r", tuple(b"hello" + b"hel"), 9, generated_before=3)
            tokens, reason = await echo_of(backend, rest)
            assert (tokens[:-1], reason) == (list(b"lo"), FinishReason.EOS)

    asyncio.run(main())


def test_sampling_does_not_disturb_the_echo(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment()) as backend:
            request = GenerationRequest("r", tuple(b"hello hello"), 50)
            sampling = replace(request.sampling, do_sample=True, repetition_penalty=1.5, seed=5)
            tokens, _ = await echo_of(backend, replace(request, sampling=sampling))
            assert tokens[:-1] == list(b"hello hello")

    asyncio.run(main())


def test_any_vocabulary_works(deployment: Make, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    plain = deployment(serving={"tokenizer": "auto"})

    async def main() -> None:
        async with running(replace(plain, model_dir=tmp_path)) as backend:
            assert backend.limits.vocab_size == 1000
            tokens, reason = await echo_of(backend, GenerationRequest("r", (999, 0, 999, 5), 50))
            assert (tokens[:-1], reason) == ([999, 0, 999, 5], FinishReason.EOS)

    asyncio.run(main())


def test_a_config_json_without_vocabulary_is_named(deployment: Make, tmp_path: Path) -> None:
    plain = replace(deployment(serving={"tokenizer": "auto"}), model_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        EchoBackend(plain)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"vocab_size must be a positive integer, found None"):
        EchoBackend(plain)


def test_a_prompt_without_a_marked_end_is_an_error_not_a_guess(deployment: Make) -> None:
    plain = deployment()
    model = EchoStepModel(plain)
    engine = Engine(model, model.load(), plain.serving, Sampler(None))
    engine.apply(Submit(1, GenerationRequest("r", (1, 2), 3), 0.0))
    engine.step()
    assert "no marked end" in engine.report().failures[0].message


def test_every_echo_is_exact_under_preemption_chunking_and_sharing(deployment: Make) -> None:
    rng = random.Random(3)
    plain = deployment(
        serving={
            "echo": EchoConfig(num_blocks=40, block_size=4),
            "max_batched_tokens": 24,
            "max_batch_size": 12,
        }
    )

    async def main() -> None:
        async with running(plain) as backend:
            prompts = [
                b"the same beginning "[: rng.randint(1, 19)] * rng.randint(1, 3) for _ in range(99)
            ]
            requests = [
                GenerationRequest(str(n), tuple(p), 80, priority=rng.randint(1, 5))
                for n, p in enumerate(prompts)
            ]
            answers = await asyncio.gather(*(echo_of(backend, request) for request in requests))
            assert [bytes(tokens[:-1]) for tokens, _ in answers] == prompts
            status = backend.status()
            assert status.preemptions > 0
            assert status.prefix_hit_tokens > 0
            assert status.free_blocks == status.total_blocks == 40

    asyncio.run(main())
