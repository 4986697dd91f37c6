"""EngineBackend over a real engine process: what a server sees of it."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import msgspec
import pytest

from mindstream.backends.engine import EngineBackend
from mindstream.backends.engine.link import EngineEnd, FrameReader
from mindstream.backends.engine.messages import Log, Notice
from mindstream.backends.engine.process import _LinkHandler
from mindstream.backends.engine.testing import (
    GIVES_NAN,
    PRINTS,
    RAISES,
    VOCAB,
    reference_tokens,
)
from mindstream.plugin.backend import State
from mindstream.plugin.errors import (
    BackendFailed,
    ConfigError,
    Overloaded,
    RequestRefused,
    ServiceStopped,
)
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.request import Chunk, FinishReason, GenerationRequest, SamplingParams
from mindstream.plugin.testing import started

Make = Callable[..., Deployment]
HASH_MODEL = "mindstream.backends.engine.testing:HashModel"


def running(deployment: Deployment) -> AbstractAsyncContextManager[EngineBackend]:
    return started(EngineBackend(deployment, HASH_MODEL))


def request(*prompt: int, new: int = 5, seed: int = 2, priority: int = 5) -> GenerationRequest:
    sampling = SamplingParams(do_sample=True, seed=seed)
    return GenerationRequest("r", prompt, new, sampling, priority=priority)


async def collect(backend: EngineBackend, wanted: GenerationRequest) -> list[Chunk]:
    async with backend.submit(wanted) as chunks:
        return [chunk async for chunk in chunks]


def tokens(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


async def settled(backend: EngineBackend) -> None:
    """Waits until the engine says that nothing runs."""
    await eventually(lambda: not backend.status().running and not backend.status().waiting)


async def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        await asyncio.sleep(0.01)


def test_a_request_gives_its_tokens_times_and_one_finish_reason(either_loop: Make) -> None:
    async def main() -> None:
        async with running(either_loop()) as backend:
            assert backend.limits.vocab_size == VOCAB
            assert backend.status().state is State.READY
            chunks = await collect(backend, request(2, 3, 4))
            assert tokens(chunks) == reference_tokens(request(2, 3, 4))
            assert [chunk.generated_tokens for chunk in chunks] == [1, 2, 3, 4, 5]
            assert [chunk.finish_reason for chunk in chunks] == [None] * 4 + [FinishReason.LENGTH]
            assert chunks[0].prefill_ms is not None and chunks[0].decode_ms is None
            assert all(c.prefill_ms is None and c.decode_ms is not None for c in chunks[1:])
            assert all(chunk.batch_size == 1 and chunk.queue_wait_us >= 0 for chunk in chunks)

    asyncio.run(main())


def test_an_end_token_is_counted_and_its_id_is_in_the_chunk(deployment: Make) -> None:
    async def main() -> None:
        full = reference_tokens(request(2, 3, 4, new=20))
        wanted = GenerationRequest(
            "r", (2, 3, 4), 20, SamplingParams(do_sample=True, seed=2), eos_token_ids=(full[2],)
        )
        async with running(deployment()) as backend:
            chunks = await collect(backend, wanted)
        assert chunks[-1].finish_reason is FinishReason.EOS
        assert tokens(chunks) == full[: chunks[-1].generated_tokens]
        assert chunks[-1].token_ids == (full[2],)

    asyncio.run(main())


def test_measured_times_are_those_of_the_steps(either_loop: Make) -> None:
    async def main() -> None:
        async with running(either_loop(step_ms=20, serving={"max_batch_size": 1})) as backend:
            first, second = await asyncio.gather(
                collect(backend, request(2, new=3)), collect(backend, request(3, new=3))
            )
        assert first[0].prefill_ms is not None and first[0].prefill_ms >= 20
        assert all(chunk.decode_ms is not None and chunk.decode_ms >= 20 for chunk in first[1:])
        assert second[0].queue_wait_us >= 60_000  # three steps of the first one

    asyncio.run(main())


def test_a_chunk_without_a_token_has_no_times(either_loop: Make) -> None:
    async def main() -> None:
        async with running(either_loop(step_ms=5, serving={"max_batch_size": 1})) as backend:
            first = asyncio.ensure_future(collect(backend, request(2, new=30)))
            await eventually(lambda: backend.status().running == 1)
            waiting = backend.submit(request(3, new=5))
            async with waiting as chunks:
                await eventually(lambda: backend.status().waiting == 1)
                waiting.stop()
                [last] = [chunk async for chunk in chunks]
            await first
        assert (last.token_ids, last.generated_tokens, last.batch_size) == ((), 0, 0)
        assert (last.prefill_ms, last.decode_ms) == (None, None)
        assert last.queue_wait_us > 0

    asyncio.run(main())


def test_leaving_a_stream_frees_its_blocks(either_loop: Make) -> None:
    async def main() -> None:
        async with running(either_loop(step_ms=2)) as backend:
            async with backend.submit(request(2, new=200)) as chunks:
                await anext(chunks)
                assert backend.status().free_blocks < 64
            await settled(backend)
            assert backend.status().free_blocks == 64

    asyncio.run(main())


def test_stop_ends_a_stream_with_a_last_chunk(either_loop: Make) -> None:
    async def main() -> None:
        async with running(either_loop(step_ms=2)) as backend:
            stream = backend.submit(request(2, new=200))
            async with stream as chunks:
                got = [await anext(chunks)]
                stream.stop()
                got += [chunk async for chunk in chunks]
            assert got[-1].finish_reason is FinishReason.STOP
            assert got[-1].token_ids == ()
            assert tokens(got) == reference_tokens(request(2, new=200))[: len(tokens(got))]
            assert got[-1].generated_tokens == len(tokens(got))
            stream.stop()  # after the end: no effect
            await settled(backend)
            assert backend.status().free_blocks == 64

    asyncio.run(main())


def test_refusals_come_at_once_or_before_the_first_chunk(deployment: Make) -> None:
    async def main() -> None:
        serving = {"max_batch_size": 1, "max_waiting": 1}
        async with running(deployment(step_ms=5, serving=serving)) as backend:
            with pytest.raises(RequestRefused, match="exceed max_seq_len 256"):
                await collect(backend, request(*[2] * 250, new=10))
            async with backend.submit(request(2, new=200)), backend.submit(request(3)):
                assert backend.status().state is State.BUSY
                with pytest.raises(Overloaded, match=r"serving\.max_waiting is 1") as caught:
                    backend.submit(request(4))
                assert caught.value.retry_after >= 1
            assert tokens(await collect(backend, request(5))) == reference_tokens(request(5))

    asyncio.run(main())


def test_a_failing_step_is_an_error_of_its_requests_and_the_engine_goes_on(
    either_loop: Make, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with running(either_loop()) as backend:
            with pytest.raises(BackendFailed, match="RuntimeError: the device is unwell"):
                await collect(backend, request(2, RAISES))
            assert tokens(await collect(backend, request(2))) == reference_tokens(request(2))
            assert backend.status().state is State.READY
            assert backend.status().free_blocks == 64

    asyncio.run(main())
    assert "a step of 1 sequences failed" in caplog.text


def test_logits_that_cannot_be_sampled_end_that_request_alone(either_loop: Make) -> None:
    async def main() -> None:
        async with running(either_loop(step_ms=5)) as backend:
            good = asyncio.ensure_future(collect(backend, request(2, new=20)))
            with pytest.raises(BackendFailed, match="No token could be chosen"):
                await collect(backend, request(3, GIVES_NAN))
            assert tokens(await good) == reference_tokens(request(2, new=20))

    asyncio.run(main())


def test_what_the_engine_logs_and_prints_reaches_the_servers_log(
    either_loop: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mindstream")

    async def main() -> None:
        async with running(either_loop()) as backend:
            await collect(backend, request(2, PRINTS))
            await eventually(lambda: "noise on stdout" in caplog.text)

    asyncio.run(main())
    logged = {(record.name, record.getMessage()) for record in caplog.records}
    assert ("mindstream.backends.engine.testing", "loading weights") in logged
    assert ("mindstream.engine.output", "noise on stdout") in logged


def test_a_model_that_refuses_to_start_is_a_config_error(either_loop: Make) -> None:
    async def main() -> None:
        backend = EngineBackend(either_loop(refuse="test.yaml: no such weights."), HASH_MODEL)
        with pytest.raises(ConfigError, match=r"^test\.yaml: no such weights\.$"):
            await backend.start()
        assert backend.status().state is State.FAILED
        with pytest.raises(BackendFailed, match="no such weights"):
            backend.submit(request(2))
        await backend.stop(drain=False)

    asyncio.run(main())


def test_an_engine_that_dies_while_loading_is_a_config_error_with_its_last_words(
    deployment: Make,
) -> None:
    async def main() -> None:
        backend = EngineBackend(deployment(exit_while_loading=True), HASH_MODEL)
        with pytest.raises(ConfigError, match="exited with status 3: no device here"):
            await backend.start()
        await backend.stop(drain=False)

    asyncio.run(main())


def test_a_kv_cache_shorter_than_max_seq_len_limits_it(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment(num_blocks=5, block_size=4, max_seq_len=99)) as backend:
            assert backend.limits.max_seq_len == 20

    asyncio.run(main())


def test_a_cache_without_blocks_is_a_config_error(deployment: Make) -> None:
    async def main() -> None:
        backend = EngineBackend(deployment(num_blocks=0), HASH_MODEL)
        with pytest.raises(ConfigError, match="0 blocks of 4 tokens"):
            await backend.start()
        await backend.stop(drain=False)

    asyncio.run(main())


def test_draining_lets_running_requests_end_and_takes_no_new_ones(either_loop: Make) -> None:
    async def main() -> None:
        backend = EngineBackend(either_loop(step_ms=5), HASH_MODEL)
        await backend.start()
        answer = asyncio.ensure_future(collect(backend, request(2, new=20)))
        await asyncio.sleep(0)
        stopping = asyncio.ensure_future(backend.stop(drain=True))
        await asyncio.sleep(0)
        with pytest.raises(ServiceStopped):
            backend.submit(request(3))
        assert tokens(await answer) == reference_tokens(request(2, new=20))
        await stopping
        await backend.stop(drain=True)  # idempotent
        assert backend.status().state is State.STOPPED

    asyncio.run(main())


def test_a_second_stop_cuts_a_drain_short(deployment: Make) -> None:
    async def main() -> None:
        backend = EngineBackend(deployment(step_ms=20), HASH_MODEL)
        await backend.start()
        answer = asyncio.ensure_future(collect(backend, request(2, new=200)))
        await asyncio.sleep(0.05)
        stopping = asyncio.ensure_future(backend.stop(drain=True))
        await asyncio.sleep(0)
        await backend.stop(drain=False)
        with pytest.raises(ServiceStopped):
            await answer
        await stopping

    asyncio.run(main())


def test_a_repeated_beginning_is_found_in_the_prefix_cache(deployment: Make) -> None:
    async def main() -> None:
        async with running(deployment()) as backend:
            cold = await collect(backend, request(*[5] * 40))
            assert backend.status().prefix_hit_tokens == 0
            warm = await collect(backend, request(*[5] * 40))
            status = backend.status()
            assert tokens(warm) == tokens(cold)
            assert (status.prefix_query_tokens, status.prefix_hit_tokens) == (80, 36)
            assert (status.prompt_tokens, status.generated_tokens) == (80, 10)

    asyncio.run(main())


def test_a_log_line_arrives_bare_whatever_format_a_library_sets() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        handler = _LinkHandler(EngineEnd(theirs))
        handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        handler.handle(logging.LogRecord("a.name", logging.INFO, "f", 1, "x %d", (1,), None))
        notice = FrameReader().feed(ours.recv(4096))[0]
    assert msgspec.msgpack.Decoder(Notice).decode(notice) == Log(logging.INFO, "a.name", "x 1")
