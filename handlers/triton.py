"""The Triton dialect's generating routes: /v2/models/{m}/generate, /generate_stream, /infer.

A request is checked in the real server's order, so that of several faults the same one is told:
model, JSON, service stopped, id, text_input, tokens, parameters, and then the engine's limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Any

from mindstream.handlers import triton_request as wire
from mindstream.handlers.base import ApiHandler, PostHandler
from mindstream.handlers.measures import RequestMeasure
from mindstream.handlers.state import require_running
from mindstream.handlers.triton_codec import (
    ReplyOptions,
    TritonStreamCodec,
    token_reply,
    whole_reply,
)
from mindstream.handlers.triton_tokens import read_token_input
from mindstream.plugin.errors import GenerationTimeout, InvalidRequest, RequestRefused
from mindstream.plugin.media.items import Item, MediaItem, text_only
from mindstream.plugin.media.load import load
from mindstream.plugin.model_config import MediaConfig
from mindstream.plugin.request import GenerationRequest
from mindstream.plugin.service import ModelService, TextChunk
from mindstream.plugin.validation import to_generation_request

RECOMPUTE_HEADER = "is-recompute"


@dataclass(frozen=True, slots=True)
class Call:
    """A request that passed every check."""

    service: ModelService
    request: GenerationRequest
    parameters: wire.Parameters
    measure: RequestMeasure

    def run(self, *, stream: bool) -> AbstractAsyncContextManager[AsyncIterator[TextChunk]]:
        """In a stream the client's time limit starts again with every event."""
        chunks = self.service.stream(
            self.request, timeout=self.parameters.timeout, restart_at_token=stream
        )
        return self.measure.watch(chunks, self.request)

    def options(self) -> ReplyOptions:
        serving = self.service.deployment.serving
        return ReplyOptions(
            request_id=self.request.request_id,
            model_name=self.service.name,
            details=self.parameters.details,
            full_text=serving.full_text_enabled,
            measured_costs=serving.measured_costs,
            raw_error_text=serving.compat.raw_error_text,
            first_token_before=self.parameters.first_token_ms,
            decode_before=self.parameters.decode_ms,
        )


class GenerateStream(PostHandler):
    """One event a token."""

    async def answer(self, model: str, version: str | None = None) -> None:
        call = await read_text_call(self, model, version)
        await self.stream(call.run(stream=True), TritonStreamCodec(call.options()))


class Generate(PostHandler):
    """The whole text at once."""

    async def answer(self, model: str, version: str | None = None) -> None:
        call = await read_text_call(self, model, version)
        async with call.run(stream=False) as chunks:
            pieces = [chunk async for chunk in chunks]
        self.write_json(whole_reply(call.options(), pieces))


class Infer(PostHandler):
    """Token ids in, token ids out."""

    async def answer(self, model: str, version: str | None = None) -> None:
        service, body = await open_body(self, model, version)
        prompt_ids, parameters = await self.off_loop(read_token_input, body)
        call = await _call(self, service, prompt_ids, parameters)
        async with call.run(stream=False) as chunks:
            ids = [token_id async for piece in chunks for token_id in piece.chunk.token_ids]
        self.write_json(token_reply(call.request.request_id, ids))


async def open_body(
    handler: ApiHandler, model: str, version: str | None
) -> tuple[ModelService, dict[str, Any]]:
    """The first checks of every request, and the id it is logged under."""
    service = handler.state.model(model, version)
    handler.measure = handler.state.metrics.received(service.name)
    body = await handler.json_body()
    require_running(service)
    mode = service.deployment.serving.validation
    handler.request_id = wire.read_id(body, mode) or handler.state.new_request_id()
    return service, body


async def read_text_call(handler: ApiHandler, model: str, version: str | None) -> Call:
    service, body = await open_body(handler, model, version)
    serving = service.deployment.serving
    text = await handler.off_loop(wire.read_text_input, body, handler.request_id, serving)
    if handler.request.headers.get(RECOMPUTE_HEADER, "").lower() == "true":
        if not isinstance(text, str):
            raise InvalidRequest("text_input must be string type with is-recompute.")
        earlier = await handler.off_loop(wire.read_recompute, text)
        return await _call(
            handler, service, earlier.token_ids, body.get("parameters"), earlier.generated_before
        )
    if not isinstance(text, str):
        text = await _text_of_items(service, text)
        wire.check_text_length(text, serving)
    prompt_ids = await service.encode(text)
    wire.check_token_count(len(prompt_ids))
    return await _call(handler, service, prompt_ids, body.get("parameters"))


async def _call(
    handler: ApiHandler,
    service: ModelService,
    prompt_ids: tuple[int, ...],
    given: Any,
    generated_before: int = 0,
) -> Call:
    mode = service.deployment.serving.validation
    parameters = await handler.off_loop(wire.read_parameters, given, mode)
    wire.check_recompute_times(parameters, generated_before)
    draft = wire.to_draft(handler.request_id, prompt_ids, parameters, generated_before)
    request = to_generation_request(draft, service.defaults, service.limits)
    measure = handler.measure or handler.state.metrics.received(service.name)
    return Call(service, request, parameters, measure)


async def _text_of_items(service: ModelService, items: Sequence[Item]) -> str:
    """Media that are broken or not allowed are told as such; whole ones the model cannot take."""
    serving = service.deployment.serving
    if any(isinstance(item, MediaItem) for item in items):
        try:
            await asyncio.wait_for(_look_at(items, serving.media), serving.e2e_timeout)
        except asyncio.TimeoutError:
            raise GenerationTimeout("server e2eTimeout") from None
    return text_only(items, service.name)


async def _look_at(items: Sequence[Item], config: MediaConfig) -> None:
    # Without the packages nothing can be looked at, and installing them would not help the client.
    with suppress(RequestRefused):
        async with load(items, config):
            pass
