"""One served model: deployment, tokenizer, backend and defaults, composed. On the event loop.

Handlers talk to this and to nothing behind it. `stream` is the life of one request: it is
submitted, its tokens become text, its time limits are kept, and leaving the block frees what it
held.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

from mindstream.plugin.backend import Backend, BackendStatus, TokenStream
from mindstream.plugin.deadline import Deadline, TimeLimits
from mindstream.plugin.defaults import Defaults, resolve_defaults
from mindstream.plugin.detokenizer import Detokenizer
from mindstream.plugin.errors import BackendFailed, ConfigError, RequestRefused
from mindstream.plugin.model_config import Deployment
from mindstream.plugin.registry import load_backend
from mindstream.plugin.request import Chunk, FinishReason, GenerationRequest
from mindstream.plugin.tokenizer import Tokenizer, open_tokenizer

# About a millisecond of tokenising; a longer text goes to a worker thread.
_INLINE_CHARACTERS = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """One engine step of one request as text.

    `text` is what became complete; what was held back is in the last one.
    """

    text: str
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class ServiceLimits:
    """What a request must keep, resolved from deployment and model. In tokens."""

    max_seq_len: int  # prompt and output
    max_input_tokens: int
    max_iter_times: int  # cap on the output
    vocab_size: int  # of the logits: a prompt id must be below it


class ModelService:
    """A deployment, answering between `start()` and `stop()`."""

    def __init__(
        self, deployment: Deployment, tokenizer: Tokenizer, backend: Backend, defaults: Defaults
    ) -> None:
        self.deployment = deployment
        self.tokenizer = tokenizer
        self.backend = backend
        self.defaults = defaults
        self._limits: ServiceLimits | None = None
        self._running: dict[str, TokenStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def name(self) -> str:
        """The served model name."""
        return self.deployment.name

    @property
    def limits(self) -> ServiceLimits:
        """Valid after `start()`."""
        if self._limits is None:
            raise RuntimeError("ModelService.limits is known only after start()")
        return self._limits

    async def start(self) -> None:
        """Raises ConfigError if the deployment cannot be served."""
        await self.backend.start()
        self._limits = _resolve_limits(self.deployment, self.backend)
        if self.tokenizer.vocab_size > self._limits.vocab_size:
            log.warning(
                "%s: the tokenizer has %d ids, the model only %d; a prompt with a higher one is "
                "refused",
                self.name,
                self.tokenizer.vocab_size,
                self._limits.vocab_size,
            )

    async def stop(self, *, drain: bool) -> None:
        """With `drain`, running requests get `serving.drain_timeout` seconds to end. Idempotent.

        A request has ended when its last chunk was taken, which a slow client may put off.
        """
        if drain:
            try:
                await asyncio.wait_for(self._drain(), self.deployment.serving.drain_timeout)
            except (TimeoutError, asyncio.TimeoutError):
                log.warning("%s: requests still ran after drain_timeout; ending them", self.name)
        await self.backend.stop(drain=False)

    async def _drain(self) -> None:
        await self.backend.stop(drain=True)
        await self._idle.wait()

    def status(self) -> BackendStatus:
        """Cheap; never raises."""
        return self.backend.status()

    async def encode(self, text: str) -> tuple[int, ...]:
        """The prompt's ids. Raises InvalidRequest for text that UTF-8 cannot carry."""
        if len(text) <= _INLINE_CHARACTERS:
            return tuple(self.tokenizer.encode(text))
        return await asyncio.to_thread(lambda: tuple(self.tokenizer.encode(text)))

    def stream(
        self, request: GenerationRequest, *, timeout: float, restart_at_token: bool
    ) -> AbstractAsyncContextManager[AsyncIterator[TextChunk]]:
        """Runs a request: `async with service.stream(...) as chunks: async for c in chunks`.

        Leaving the block early cancels it. Entering raises what `Backend.submit` raises, iterating
        any RequestError; GenerationTimeout also when the engine hangs. `timeout` is in seconds.
        """
        serving = self.deployment.serving
        times = TimeLimits(timeout, serving.token_timeout, serving.e2e_timeout, restart_at_token)
        return self._stream(request, times)

    def is_running(self, request_id: str) -> bool:
        """Whether a request of this id has not ended yet."""
        return request_id in self._running

    def stop_request(self, request_id: str) -> bool:
        """Ends a running request with FinishReason.STOP; False if there is none of this id."""
        stream = self._running.get(request_id)
        if stream is None:
            return False
        stream.stop()
        return True

    @asynccontextmanager
    async def _stream(
        self, request: GenerationRequest, times: TimeLimits
    ) -> AsyncIterator[AsyncIterator[TextChunk]]:
        if request.request_id in self._running:
            raise RequestRefused("Runtime request has been used before.")
        deadline = Deadline(times)
        stream = self.backend.submit(request)
        self._running[request.request_id] = stream
        self._idle.clear()
        try:
            async with stream as chunks:
                yield _TextStream(chunks, self._open_text(request), request, deadline)
        finally:
            deadline.close()
            del self._running[request.request_id]
            if not self._running:
                self._idle.set()

    def _open_text(self, request: GenerationRequest) -> Detokenizer:
        """Continues behind what an earlier attempt generated, which may end inside a character."""
        text = self.tokenizer.detokenizer()
        if request.generated_before:
            for token_id in request.prompt_ids[-request.generated_before :]:
                text.push(token_id)
        return text


class _TextStream:
    """The chunks of one request as text; a plain iterator, since it runs once a token."""

    def __init__(
        self,
        chunks: AsyncIterator[Chunk],
        text: Detokenizer,
        request: GenerationRequest,
        deadline: Deadline,
    ) -> None:
        self._chunks = chunks
        self._text = text
        self._request = request
        self._deadline = deadline
        self._ended = False

    def __aiter__(self) -> AsyncIterator[TextChunk]:
        return self

    async def __anext__(self) -> TextChunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            chunk = await self._deadline.wait(self._chunks.__anext__())
        except StopAsyncIteration:
            raise BackendFailed("The backend ended the request without a finish reason.") from None
        self._ended = chunk.finish_reason is not None
        return TextChunk(self._piece(chunk), chunk)

    def _piece(self, chunk: Chunk) -> str:
        ids = chunk.token_ids
        if chunk.finish_reason is FinishReason.EOS and ids:
            # A model's end token need not be marked special in its tokenizer.json.
            ids = ids[:-1] if ids[-1] in self._request.eos_token_ids else ids
        piece = "".join([self._text.push(token_id) for token_id in ids])
        return piece + self._text.flush() if self._ended else piece


def open_service(deployment: Deployment) -> ModelService:
    """Composes what the deployment names; not yet started. Raises ConfigError."""
    _check_model_dir(deployment)
    factory = load_backend(deployment.serving.backend)
    defaults = resolve_defaults(deployment, getattr(factory, "defaults_rule", "ms"))
    return ModelService(deployment, open_tokenizer(deployment), factory(deployment), defaults)


def _check_model_dir(deployment: Deployment) -> None:
    folder, pull = deployment.model_dir, deployment.serving.pull
    if folder is None or folder.is_dir():
        return
    cure = f"run: mindstream pull {pull}" if pull else "set pretrained_model_dir to where it is"
    found = "is not a directory" if folder.exists() else "does not exist"
    raise ConfigError(f"{deployment.path}: the weight directory {folder} {found}; {cure}.")


def _resolve_limits(deployment: Deployment, backend: Backend) -> ServiceLimits:
    serving, model = deployment.serving, backend.limits
    max_seq_len = min(serving.max_seq_len or model.max_seq_len, model.max_seq_len)
    return ServiceLimits(
        max_seq_len=max_seq_len,
        max_input_tokens=min(serving.max_input_token_len or max_seq_len, max_seq_len - 1),
        max_iter_times=serving.max_iter_times or max_seq_len,
        vocab_size=model.vocab_size,
    )
