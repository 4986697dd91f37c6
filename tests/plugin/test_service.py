"""One request through the service: text, time limits, stop, cancel, broken backends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mindstream.plugin.backend import Limits, State
from mindstream.plugin.errors import (
    BackendFailed,
    GenerationTimeout,
    Overloaded,
    RequestRefused,
)
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.request import Chunk, FinishReason, GenerationRequest
from mindstream.plugin.service import ModelService, ServiceLimits
from mindstream.plugin.testing import Delay, Item, ScriptedBackend, scripted_service

EOS = FinishReason.EOS


def request(request_id: str = "r", **fields: object) -> GenerationRequest:
    base = GenerationRequest(request_id, tuple(b"prompt"), 100, eos_token_ids=(0,))
    return replace(base, **fields)  # type: ignore[arg-type]  # keywords of one dataclass


async def run(
    service: ModelService,
    one: GenerationRequest | None = None,
    *,
    timeout: float = 30.0,
    restart: bool = True,
) -> list[tuple[str, Chunk]]:
    source = service.stream(one or request(), timeout=timeout, restart_at_token=restart)
    async with source as chunks:
        return [(chunk.text, chunk.chunk) async for chunk in chunks]


def repeat(*items: Item, times: int) -> list[Item]:
    return [*items] * times


def short_limits(backend: ScriptedBackend, **limits: str) -> ModelService:
    return scripted_service(backend, load_deployment("echo", limits))


class TestText:
    async def test_one_piece_a_chunk_and_the_rest_in_the_last(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue("a€", b"\xe2\x82", FinishReason.LENGTH)
        got = await run(scripted_service(scripted_backend))
        assert [text for text, _ in got] == ["a", "", "", "€", "", "\ufffd"]
        assert [chunk.finish_reason for _, chunk in got] == [None] * 5 + [FinishReason.LENGTH]

    async def test_the_end_token_gives_no_text_even_if_it_is_plain(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue("hi", b"\0", EOS)
        assert "".join(text for text, _ in await run(scripted_service(scripted_backend))) == "hi"
        scripted_backend.enqueue("h\0i", EOS)  # not at the end it is a token like any other
        assert "".join(text for text, _ in await run(scripted_service(scripted_backend))) == "h\0i"

    async def test_a_recompute_continues_inside_a_character(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue(b"\xac!", EOS)
        one = request(prompt_ids=tuple(b"p\xe2\x82"), generated_before=2)
        got = await run(scripted_service(scripted_backend), one)
        assert [text for text, _ in got] == ["€", "!"]
        assert [chunk.generated_tokens for _, chunk in got] == [3, 4]

    async def test_encode_in_line_and_in_a_thread(self, scripted_backend: ScriptedBackend) -> None:
        service = scripted_service(scripted_backend)
        assert await service.encode("héllo") == tuple("héllo".encode())
        long = "é" * 100_000
        assert await service.encode(long) == tuple(long.encode())


class TestTime:
    async def test_client_timeout(self, scripted_backend: ScriptedBackend) -> None:
        scripted_backend.enqueue("a", scripted_backend.gate())
        with pytest.raises(GenerationTimeout, match="client timeout"):
            await run(scripted_service(scripted_backend), timeout=0.02)
        assert scripted_backend.cancelled == ["r"]

    async def test_token_timeout(self, scripted_backend: ScriptedBackend) -> None:
        scripted_backend.enqueue("a", scripted_backend.gate())
        with pytest.raises(GenerationTimeout, match="server tokenTimeout"):
            await run(short_limits(scripted_backend, token_timeout="0.02"))

    async def test_e2e_timeout_is_not_restarted_by_tokens(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue(*repeat("a", Delay(0.01), times=1000), EOS)
        with pytest.raises(GenerationTimeout, match="server e2eTimeout"):
            await run(short_limits(scripted_backend, e2e_timeout="0.05"))

    async def test_a_token_restarts_the_others_in_a_stream(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue(*repeat("a", Delay(0.1), times=6), EOS)
        got = await run(scripted_service(scripted_backend), timeout=0.5)
        assert len(got) == 7

    async def test_but_not_in_a_plain_reply(self, scripted_backend: ScriptedBackend) -> None:
        scripted_backend.enqueue(*repeat("a", Delay(0.05), times=1000), EOS)
        with pytest.raises(GenerationTimeout, match="client timeout"):
            await run(scripted_service(scripted_backend), timeout=0.2, restart=False)

    async def test_a_slow_reader_is_not_a_slow_engine(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue("ab", EOS)
        service = scripted_service(scripted_backend)
        texts = []
        async with service.stream(request(), timeout=0.02, restart_at_token=True) as chunks:
            async for chunk in chunks:
                texts.append(chunk.text)
                await asyncio.sleep(0.05)
        assert texts == ["a", "b"]

    async def test_a_cancelled_task_is_cancelled_not_timed_out(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue("a", scripted_backend.gate())
        task = asyncio.create_task(run(scripted_service(scripted_backend)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert scripted_backend.cancelled == ["r"]

    async def test_after_a_timeout_the_task_goes_on(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.enqueue(scripted_backend.gate())
        service = scripted_service(scripted_backend)

        async def twice() -> int:
            with pytest.raises(GenerationTimeout):
                await run(service, timeout=0.01)
            await asyncio.sleep(0)
            return len(await run(service))

        assert await asyncio.wait_for(twice(), 30) == len(b"prompt")


class TestEnds:
    async def test_stop_ends_with_a_reason_and_the_rest(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        gate = scripted_backend.gate()
        scripted_backend.enqueue("a", b"\xe2", gate, "never")
        service = scripted_service(scripted_backend)
        task = asyncio.create_task(run(service))
        await asyncio.sleep(0.01)
        assert service.is_running("r") and service.stop_request("r")
        got = await task
        assert [text for text, _ in got] == ["a", "", "\ufffd"]
        assert got[-1][1].finish_reason is FinishReason.STOP
        assert not service.is_running("r") and not service.stop_request("r")
        assert scripted_backend.cancelled == []

    async def test_leaving_the_block_cancels(self, scripted_backend: ScriptedBackend) -> None:
        scripted_backend.enqueue("abc", EOS)
        service = scripted_service(scripted_backend)
        async with service.stream(request(), timeout=9, restart_at_token=True) as chunks:
            await anext(chunks)
        assert scripted_backend.cancelled == ["r"] and service.status().running == 0

    async def test_no_finish_reason_is_a_failure(self, scripted_backend: ScriptedBackend) -> None:
        scripted_backend.enqueue("a")
        with pytest.raises(BackendFailed, match="without a finish reason"):
            await run(scripted_service(scripted_backend))

    async def test_an_error_passes_through(self, scripted_backend: ScriptedBackend) -> None:
        scripted_backend.enqueue("a", BackendFailed("the engine died"))
        with pytest.raises(BackendFailed, match="the engine died"):
            await run(scripted_service(scripted_backend))

    async def test_a_refusal_passes_through_and_leaves_no_trace(
        self, scripted_backend: ScriptedBackend
    ) -> None:
        scripted_backend.submit_error = Overloaded("full", 7)
        service = scripted_service(scripted_backend)
        with pytest.raises(Overloaded) as caught:
            await run(service)
        assert caught.value.retry_after == 7 and not service.is_running("r")

    async def test_an_id_in_use_is_refused(self, scripted_backend: ScriptedBackend) -> None:
        service = scripted_service(scripted_backend)
        async with service.stream(request(), timeout=9, restart_at_token=True):
            with pytest.raises(RequestRefused, match=r"Runtime request has been used before\."):
                await run(service)
        assert len(await run(service)) == len(b"prompt")


class TestLife:
    @pytest.mark.parametrize(
        ("yaml", "limits"),
        [
            ({}, ServiceLimits(1000, 999, 512, 256)),
            ({"max_seq_len": "0"}, ServiceLimits(1000, 999, 512, 256)),
            ({"max_seq_len": "100"}, ServiceLimits(100, 99, 512, 256)),
            ({"max_input_token_len": "50"}, ServiceLimits(1000, 50, 512, 256)),
            ({"max_input_token_len": "5000"}, ServiceLimits(1000, 999, 512, 256)),
            ({"max_iter_times": "0"}, ServiceLimits(1000, 999, 1000, 256)),
        ],
    )
    async def test_limits(self, yaml: dict[str, str], limits: ServiceLimits) -> None:
        backend = ScriptedBackend(Limits(256, 1000, 8))
        service = short_limits(backend, **yaml)
        await service.start()
        assert service.limits == limits

    async def test_stop_drains(self, scripted_backend: ScriptedBackend) -> None:
        scripted_backend.enqueue("a", Delay(0.05), "b", EOS)
        service = scripted_service(scripted_backend)
        await service.start()
        task = asyncio.create_task(run(service))
        await asyncio.sleep(0.01)
        await service.stop(drain=True)
        assert "".join(text for text, _ in await task) == "ab"
        assert service.status().state is State.STOPPED

    async def test_draining_has_an_end(
        self, scripted_backend: ScriptedBackend, caplog: pytest.LogCaptureFixture
    ) -> None:
        scripted_backend.enqueue(scripted_backend.gate())
        service = short_limits(scripted_backend, drain_timeout="0.02")
        task = asyncio.create_task(run(service))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await service.stop(drain=True)
        assert "drain_timeout" in caplog.text
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def test_a_tokenizer_larger_than_the_model_is_told(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        await scripted_service(ScriptedBackend(Limits(100, 64, 1))).start()
        assert "the tokenizer has 256 ids, the model only 100" in caplog.text
