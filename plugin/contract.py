"""Checks that a backend keeps the contract of `plugin/backend.py`; for the tests of its author.

    asyncio.run(check_contract(lambda: MyBackend(deployment), prompt_ids))

Each rule is checked over the public interface alone, so that any backend can be checked. A broken
rule is an AssertionError with one sentence. Runs on the event loop, like a backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from mindstream.plugin.backend import Backend, State
from mindstream.plugin.errors import RequestError, ServiceStopped
from mindstream.plugin.request import Chunk, FinishReason, GenerationRequest

# Seconds that a cancelled request may hold its place, and that any one answer may take.
_RELEASE = 5.0
_ANSWER = 120.0
_TOGETHER = 4


async def check_contract(
    make: Callable[[], Backend], prompt_ids: Sequence[int], max_new_tokens: int = 16
) -> None:
    """Starts the backend, checks every rule, stops it. The prompt should allow several tokens."""
    backend = make()
    request = GenerationRequest("contract", tuple(prompt_ids), max_new_tokens)
    backend.status()
    await backend.start()
    _rule(backend.status().state is State.READY, "after start() the state is READY")
    _rule(backend.limits.vocab_size > 0, "limits.vocab_size is known after start()")
    try:
        alone = await _check_answer(backend, request)
        await _check_together(backend, request, alone)
        if len(alone) > 1:
            await _check_left_early(backend, request)
            await _check_stop_call(backend, request)
        await _check_drain(backend, request, alone)
    finally:
        await backend.stop(drain=False)
    await backend.stop(drain=False)  # idempotent
    _rule(backend.status().state is State.STOPPED, "after stop() the state is STOPPED")


def _rule(kept: bool, rule: str) -> None:
    if not kept:
        raise AssertionError(f"broken rule: {rule}")


async def _answer(backend: Backend, request: GenerationRequest) -> list[Chunk]:
    chunks: list[Chunk] = []

    async def collect() -> None:
        async with backend.submit(request) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                if chunk.finish_reason is not None:
                    return

    await asyncio.wait_for(collect(), _ANSWER)
    return chunks


def _ids(chunks: Sequence[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


async def _check_answer(backend: Backend, request: GenerationRequest) -> list[int]:
    chunks = await _answer(backend, request)
    _rule(bool(chunks), "a request has at least one chunk")
    _rule(chunks[-1].finish_reason is not None, "the last chunk has a finish_reason")
    ids = _ids(chunks)
    _rule(len(ids) <= request.max_new_tokens, "there are at most max_new_tokens tokens")
    inner = ids[:-1] if chunks[-1].finish_reason is FinishReason.EOS else ids  # any end token
    _rule(all(0 <= i < backend.limits.vocab_size for i in inner), "ids are below limits.vocab_size")
    generated = 0
    for number, chunk in enumerate(chunks):
        generated += len(chunk.token_ids)
        _rule(chunk.generated_tokens == generated, "generated_tokens is cumulative")
        _rule(chunk.batch_size >= 1, "batch_size counts the sequences of the step")
        _rule(chunk.queue_wait_us >= 0, "queue_wait_us is not negative")
        first, later = chunk.prefill_ms is not None, chunk.decode_ms is not None
        _rule(first == (number == 0), "prefill_ms is in the first chunk and in no other")
        _rule(later == (number > 0), "decode_ms is in every chunk but the first")
    if chunks[-1].finish_reason is FinishReason.LENGTH:
        _rule(len(ids) > 0, "an answer cut by its length has tokens")
    return ids


async def _check_together(backend: Backend, request: GenerationRequest, alone: list[int]) -> None:
    requests = [replace(request, request_id=f"together-{n}") for n in range(_TOGETHER)]
    answers = await asyncio.gather(*(_answer(backend, one) for one in requests))
    for chunks in answers:
        _rule(_ids(chunks) == alone, "neighbours in the batch do not change a request's tokens")


async def _check_left_early(backend: Backend, request: GenerationRequest) -> None:
    async with backend.submit(replace(request, request_id="left")) as stream:
        await asyncio.wait_for(anext(stream), _ANSWER)
    deadline = asyncio.get_running_loop().time() + _RELEASE
    while backend.status().running + backend.status().waiting:
        _rule(
            asyncio.get_running_loop().time() < deadline,
            "a request whose block is left early stops running",
        )
        await asyncio.sleep(0.01)


async def _check_stop_call(backend: Backend, request: GenerationRequest) -> None:
    reason = None
    stream = backend.submit(replace(request, request_id="stopped"))
    async with stream as chunks:
        async for chunk in chunks:
            reason = chunk.finish_reason
            if reason is not None:
                break
            stream.stop()
    # A short answer may be complete before the call arrives.
    _rule(reason is not None, "stop() ends a request with a finish_reason")
    stream.stop()


async def _check_drain(backend: Backend, request: GenerationRequest, alone: list[int]) -> None:
    async with backend.submit(replace(request, request_id="draining")) as stream:
        chunks = [await asyncio.wait_for(anext(stream), _ANSWER)]
        draining = asyncio.ensure_future(backend.stop(drain=True))
        await asyncio.sleep(0)
        try:
            backend.submit(replace(request, request_id="late"))
        except ServiceStopped:
            pass
        except RequestError as error:
            raise AssertionError(
                f"broken rule: a late request gets ServiceStopped: {error}"
            ) from error
        else:
            _rule(False, "a stopping backend refuses new requests")
        while chunks[-1].finish_reason is None:
            chunks.append(await asyncio.wait_for(anext(stream), _ANSWER))
    await asyncio.wait_for(draining, _ANSWER)
    _rule(_ids(chunks) == alone, "stop(drain=True) lets running requests end as they would")
