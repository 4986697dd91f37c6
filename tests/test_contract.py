"""The contract check passes good backends and names the rule that a broken one breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mindstream.backends.echo import EchoBackend
from mindstream.plugin.contract import check_contract
from mindstream.plugin.model_config import load_deployment
from mindstream.plugin.request import Chunk, FinishReason, GenerationRequest
from mindstream.plugin.testing import ScriptedBackend, ScriptedStream

PROMPT = b"hello world"


def check(backend: ScriptedBackend) -> None:
    asyncio.run(check_contract(lambda: backend, PROMPT))


class Changing(ScriptedBackend):
    """Gives every chunk to `change` before the server sees it."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self.changes = changes
        self.submitted = 0

    def submit(self, request: GenerationRequest) -> ScriptedStream:
        self.submitted += 1
        stream = super().submit(request)
        enter, changes = stream.__aenter__, self.changes

        async def changed() -> AsyncIterator[Chunk]:
            async for chunk in await enter():
                yield replace(chunk, **changes)  # type: ignore[arg-type]  # any field

        class Wrapped(ScriptedStream):
            async def __aenter__(self) -> AsyncIterator[Chunk]:
                return changed()

        stream.__class__ = Wrapped
        return stream


class Slow(ScriptedBackend):
    """A backend whose answers take a turn of the event loop a token."""

    def next_script(self, request: GenerationRequest):  # type: ignore[no-untyped-def]  # as above
        ready = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, ready.set)
        script = super().next_script(request)
        script.insert(1, ready)
        return script


def test_the_scripted_backend_keeps_the_contract() -> None:
    check(Slow())


def test_the_shared_engine_keeps_the_contract() -> None:
    deployment = load_deployment("echo", {"echo.delay_ms": "1"})
    asyncio.run(check_contract(lambda: EchoBackend(deployment), PROMPT))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"finish_reason": None}, "the last chunk has a finish_reason"),
        ({"generated_tokens": 1}, "generated_tokens is cumulative"),
        ({"batch_size": 0}, "batch_size counts"),
        ({"queue_wait_us": -1}, "queue_wait_us is not negative"),
        ({"prefill_ms": 1.0}, "prefill_ms is in the first chunk and in no other"),
        ({"decode_ms": None}, "decode_ms is in every chunk but the first"),
        ({"token_ids": (256,)}, "ids are below limits.vocab_size"),
    ],
)
def test_a_broken_chunk_is_named(change: dict[str, object], rule: str) -> None:
    with pytest.raises(AssertionError, match=f"broken rule: .*{rule}"):
        check(Changing(**change))


def test_tokens_that_depend_on_the_neighbours_are_named() -> None:
    backend = ScriptedBackend()
    backend.enqueue("same", FinishReason.EOS)
    backend.enqueue("other", FinishReason.EOS)
    with pytest.raises(AssertionError, match="neighbours in the batch"):
        check(backend)


def test_a_request_that_runs_on_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaking(Slow):
        def leave(self, request: GenerationRequest, *, ended: bool) -> None:
            if ended:
                super().leave(request, ended=ended)

    monkeypatch.setattr("mindstream.plugin.contract._RELEASE", 0.05)
    with pytest.raises(AssertionError, match="left early stops running"):
        check(Leaking())


def test_a_backend_that_goes_on_after_stop_is_named() -> None:
    class Stubborn(Slow):
        async def stop(self, *, drain: bool) -> None:
            """Does nothing."""

    with pytest.raises(AssertionError, match="a stopping backend refuses new requests"):
        check(Stubborn())
